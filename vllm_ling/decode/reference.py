# SPDX-License-Identifier: Apache-2.0
"""Plain fp32 torch counterparts of the fused path's kernels, on the same tensors."""

import torch
import torch.nn.functional as F

from vllm_ling.cpu.kda_math import kda_steps, l2_normalize, log_decay, short_conv
from vllm_ling.decode.kda_step import KdaBatch, KdaShape, KdaStates, KdaWeights
from vllm_ling.decode.mla_attention import LatentWeights, MlaBatch
from vllm_ling.decode.mla_prepare import MlaInputs, MlaShape, MlaWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def kda_step_reference(
    shape: KdaShape,
    projected: torch.Tensor,
    normed: torch.Tensor,
    w: KdaWeights,
    states: KdaStates,
    batch: KdaBatch,
) -> torch.Tensor:
    """What `KdaStep` computes, float32 [tokens, heads * 128]; advances `states` in place, padded sequences aside.

    The outputs of padded sequences are zero.
    """
    tokens, wide = projected.shape[0], shape.heads * 128
    slots = batch.slots.view(len(batch.slots), -1).tolist()
    starts = batch.starts.tolist() if batch.starts is not None else list(range(len(slots) + 1))
    accepted = batch.accepted.tolist() if batch.accepted is not None else [1] * len(slots)
    beta = (normed.float() @ w.b.float().T).sigmoid()
    decay = log_decay(projected[:, 3 * wide : 4 * wide], w.a_log, w.dt_bias, w.lower_bound)
    gate = projected[:, 4 * wide :].float().sigmoid().view(tokens, shape.heads, 128)
    weight = torch.cat([w.q_conv, w.k_conv, w.v_conv]).T.contiguous()
    out = torch.zeros(tokens, shape.heads, 128, device=projected.device, dtype=torch.float32)
    for row, begin, end, count in zip(slots, starts, starts[1:], accepted, strict=False):
        if row[0] <= 0 or begin == end:
            continue
        x = projected[begin:end, : 3 * wide]
        history = states.conv[row[0], :, count - 1 : count + 2].T
        window = torch.cat([history, x])
        qkv = short_conv(window[None], weight)[0].view(end - begin, 3, shape.heads, 128)
        q, k, v = qkv.unbind(1)
        length = window.shape[0] - 1
        states.conv[row[0], :, :length] = window[1:].T
        o = kda_steps(
            *(l2_normalize(q) * 128**-0.5, l2_normalize(k), v, decay[begin:end], beta[begin:end]),
            states.recurrent,
            [row[count - 1]],
            [row[: end - begin]],
        )
        out[begin:end] = rms_norm(o, w.o_norm, w.eps) * gate[begin:end]
    return out.view(tokens, wide)


def mla_prepare_reference(
    shape: MlaShape, projected: torch.Tensor, normed: torch.Tensor, positions: torch.Tensor, w: MlaWeights
) -> MlaInputs:
    """What `MlaPrepare` computes, float32."""
    tokens, queries = projected.shape[0], shape.projected[0]
    cos, sin = (part.unsqueeze(1) for part in w.cos_sin[positions].float().chunk(2, -1))

    def turned(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    query = projected[:, :queries].float().view(tokens, shape.heads, -1)
    latent, key = projected[:, queries:].float().split([shape.latent, shape.rope], -1)
    return MlaInputs(
        query=torch.cat([query[..., : shape.nope], turned(query[..., shape.nope :])], -1),
        latent=rms_norm(latent, w.latent_norm, w.eps),
        key=turned(key.unsqueeze(1)),
        gate=F.linear(normed.float(), w.gate.float()).sigmoid(),
    )


def latent_query_reference(made: MlaInputs, latent: LatentWeights) -> torch.Tensor:
    """`MlaAttention.query` of what `mla_prepare_reference` made, float32 [tokens, heads, latent + rope]."""
    plain, rotated = made.query.tensor_split([latent.key.shape[1]], -1)
    return torch.cat([torch.einsum("thp,hpl->thl", plain, latent.key.float()), rotated], -1)


def mla_attention_reference(
    made: MlaInputs, latent: LatentWeights, batch: MlaBatch, scale: float
) -> torch.Tensor:
    """What `MlaAttention` computes of what `mla_prepare_reference` made, float32 [tokens, heads * 128].

    Writes the tokens' rows of the cache, rounded to its dtype, before it attends.
    """
    tokens, heads, _ = made.query.shape
    size = batch.cache.shape[1]
    for token, slot in enumerate(batch.slots.tolist()[:tokens]):
        if slot >= 0:
            batch.cache[slot // size, slot % size] = torch.cat([made.latent[token], made.key[token, 0]])
    query = latent_query_reference(made, latent)
    out = torch.zeros(tokens, heads, latent.value.shape[2], device=query.device, dtype=torch.float32)
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for row, begin, end, length in zip(batch.blocks, starts, starts[1:], lengths, strict=False):
        keys = batch.cache[row.long()].flatten(0, 1)[:length].float()
        for token in range(begin, end):
            seen = keys[: length - (end - 1 - token)]
            weights = (query[token] @ seen.T * scale).softmax(-1)
            out[token] = torch.einsum(
                "hl,hlv->hv", weights @ seen[:, : latent.key.shape[2]], latent.value.float()
            )
    return out.flatten(1)
