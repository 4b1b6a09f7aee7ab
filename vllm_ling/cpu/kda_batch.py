# SPDX-License-Identifier: Apache-2.0
"""One KDA layer over one batch: convolution and recurrence of all rows, on the layer's pools of cached states."""

import torch
from torch import Tensor

from vllm_ling.cpu.kda_math import CHUNK, kda_chunks, kda_steps, l2_normalize, short_conv
from vllm_ling.cpu.kda_rows import KdaRows, PrefillRows, StepRows


def kda_batch(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    states: Tensor,
    rows: KdaRows,
) -> Tensor:
    """Computes a batch and advances the cached states of its rows.

    Args:
        qkv: [tokens, 3 * H * D], projections before the convolution.
        g: [tokens, H, D] float32 log decay. beta: [tokens, H] float32.
        conv_weight: [W, 3 * H * D] float32.
        conv_state: [slots, W - 1 + drafts, 3 * H * D], recent projections.
        states: [slots, H, D, D] float32.

    Returns:
        [tokens, H, D] float32.
    """
    mixed = torch.empty(qkv.shape)
    for group in rows.steps:
        for slot in group.fresh:
            conv_state[slot].zero_()
            states[slot].zero_()
        mixed[group.tokens] = _conv_steps(qkv[group.tokens], conv_weight, conv_state, group)
    if rows.prefill is not None:
        _conv_prefill(qkv, conv_weight, conv_state, rows.prefill, mixed)

    q, k, v = mixed.view(rows.tokens, 3, *g.shape[1:]).unbind(1)
    q = l2_normalize(q).mul_(q.shape[-1] ** -0.5)
    k = l2_normalize(k)
    out = torch.empty_like(q)
    for group in rows.steps:
        t = group.tokens
        out[t] = kda_steps(q[t], k[t], v[t], g[t], beta[t], states, group.read, group.write)
    if rows.prefill is not None:
        t = rows.prefill.tokens
        out[t] = _prefill(q[t], k[t], v[t], g[t], beta[t], states, rows.prefill)
    return out


def _conv_steps(x: Tensor, weight: Tensor, conv_state: Tensor, group: StepRows) -> Tensor:
    """x: [rows * length, C] -> the same shape; shifts the rows' windows."""
    x = x.view(-1, group.length, x.shape[-1])
    window = torch.cat([conv_state[group.history], x.to(conv_state.dtype)], dim=1)
    conv_state[group.window] = window[:, 1:]
    return short_conv(window, weight).flatten(0, 1)


def _conv_prefill(x: Tensor, weight: Tensor, conv_state: Tensor, prefill: PrefillRows, out: Tensor) -> None:
    """Convolves each row of x [tokens, C] into out and keeps the row's last inputs."""
    keep = weight.shape[0] - 1
    for row in prefill.rows:
        past = conv_state[row.slot, :keep]
        if not row.resumed:
            past.zero_()
        window = torch.cat([past, x[row.start : row.stop].to(past.dtype)])
        past.copy_(window[-keep:])
        out[row.start : row.stop] = short_conv(window.unsqueeze(0), weight)[0]


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, prefill: PrefillRows
) -> Tensor:
    """Chunked recurrence; arguments and result hold the tokens row after row."""
    heads, chunks = q.shape[1], sum(prefill.active)

    def pack(x: Tensor) -> Tensor:
        """[tokens, H, ...] -> [chunks * H, CHUNK, ...], zero where a chunk has no token."""
        packed = x.new_zeros(chunks * CHUNK, *x.shape[1:])
        packed[prefill.places] = x
        return packed.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2).flatten(0, 1)

    rows = [states[row.slot] if row.resumed else torch.zeros_like(states[0]) for row in prefill.rows]
    ends = torch.stack(rows)
    active = [count * heads for count in prefill.active]
    beta = beta.unsqueeze(-1)
    out = kda_chunks(pack(q), pack(k), pack(v), pack(g), pack(beta), ends.flatten(0, 1), active)
    for row, end in zip(prefill.rows, ends, strict=True):
        states[row.slot].copy_(end)
    return out.view(chunks, heads, CHUNK, -1).transpose(1, 2).flatten(0, 1)[prefill.places]
