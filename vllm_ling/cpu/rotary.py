# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding for vLLM on a CPU."""

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


class CpuRotaryEmbedding(RotaryEmbedding):
    """Takes the CPU to upstream's torch form.

    Why: `RotaryEmbedding.forward_cpu` hands its tensors to a kernel that reads them as [tokens, heads * head_dim]. MLA
    passes [tokens, heads, 64] and a strided key, so only the first head is rotated, silently.
    Upstream: vllm/model_executor/layers/rotary_embedding/base.py, the same in 0.32 and 0.33; not reported as of 0.33.
    Remove when: `forward_cpu` checks or handles three-dimensional and strided inputs.
    """

    def forward_cpu(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """positions: [tokens]; query, key: [tokens, heads, rotary_dim], any strides."""
        return self.forward_native(positions, query, key)
