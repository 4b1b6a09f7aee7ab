# SPDX-License-Identifier: Apache-2.0
"""The MoE block in plain fp32 torch, on the bytes that the kernel reads: what `decode_moe` is judged by."""

import torch
import torch.nn.functional as F

from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.decode_moe import MoEShape, MoEWeights
from vllm_ling.quant.layout import from_fragment_scales, from_fragments
from vllm_ling.quant.mxfp4 import dequantize_mxfp4


def swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up of [2 I] -> [I], both clamped after SiLU as in training if `limit` is not 0."""
    gate, up = hidden.chunk(2)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit) if limit else F.silu(gate) * up


def route(
    shape: MoEShape, x: torch.Tensor, w: MoEWeights, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights float32 and expert ids int64, both [tokens, top_k], best first."""
    score = torch.sigmoid(x.float() @ w.gate.float().T)
    grouped = (score + w.bias).view(len(x), shape.groups, -1)
    best = grouped.topk(2, -1).values.sum(-1).topk(shape.top_groups, -1).indices
    keep = torch.zeros(len(x), shape.groups, device=x.device, dtype=torch.float32).scatter(1, best, 1)
    ids = grouped.masked_fill(keep[..., None] == 0, -1e30).flatten(1).topk(shape.top_k, -1).indices
    weights = score.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) * scaling, ids


def expert(w: MoEWeights, e: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert dequantized: float32 [2 I, hidden] and [hidden, I]."""
    up = dequantize_mxfp4(from_fragments(w.w13[e : e + 1]), from_fragment_scales(w.s13[e : e + 1]))[0]
    down = dequantize_mxfp4(from_fragments(w.w2[e : e + 1]), from_fragment_scales(w.s2[e : e + 1]))[0]
    return up, down


def moe_reference(
    shape: MoEShape, x: torch.Tensor, w: MoEWeights, scaling: float, limit: float, shared_limit: float
) -> torch.Tensor:
    """Routed plus shared experts of x [tokens, hidden], float32."""
    weights, ids = route(shape, x, w, scaling)
    w1, w2 = dequantize_block_fp8(w.shared_w13, w.shared_s13), dequantize_block_fp8(w.shared_w2, w.shared_s2)
    out = torch.stack([w2 @ swiglu(w1 @ token, shared_limit) for token in x.float()])
    for e in ids.unique().tolist():
        up, down = expert(w, e)
        for token, slot in (ids == e).nonzero().tolist():
            out[token] += weights[token, slot] * (down @ swiglu(up @ x[token].float(), limit))
    return out
