# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention in plain torch, shaped for a CPU: few operations per token, states updated in place.

One head keeps a state S of shape [V, K], stored as vLLM's kernels store it (value channels first). With log decay
g <= 0 per key channel and step size beta in (0, 1), a token does

    S <- S * exp(g);   S <- S + beta (v - S k) k^T;   o = S q

in float32. Formula and the 1e-6 of the normalization: vLLM's `fused_recurrent` and `kda` Triton kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of one parallel block. Half a block decays by at most exp(CHUNK / 2 * |g|), which must stay inside float32.
CHUNK = 16
MAX_DECAY = 10.0


def log_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Bounded gate: [T, H * K] projections -> g [T, H, K] float32 in (lower_bound, 0).

    a_log: one value per head, any shape; dt_bias: [H * K].
    """
    heads = a_log.numel()
    x = (f.float() + dt_bias).view(f.shape[0], heads, -1)
    return torch.sigmoid_(x.mul_(a_log.exp().view(heads, 1))).mul_(lower_bound)


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).add_(1e-6))


def short_conv(history_and_x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU.

    history_and_x: [rows, W - 1 + L, C], the inputs before the rows' first tokens and the tokens.
    weight: [W, C] float32. Returns [rows, L, C] float32.
    """
    x = history_and_x.float()
    width = weight.shape[0]
    length = x.shape[1] - width + 1
    out = x[:, :length] * weight[0]
    for tap in range(1, width):
        out.addcmul_(x[:, tap : tap + length], weight[tap])
    return F.silu(out, inplace=True)


def kda_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    read: list[int],
    write: list[list[int]],
) -> Tensor:
    """Advances rows token by token, in place in the state pool.

    Looping over rows and tokens on views is faster on a CPU than one batched update, which has to copy every state out
    of the strided pool and back; it also rounds the same way whatever the batch holds.

    Args:
        q, k, v: [T, H, K or V] float32, the rows' tokens one after another; q, k normalized, q scaled.
        g: [T, H, K] log decay. beta: [T, H].
        states: pool [slots, H, V, K] float32.
        read: per row, the slot of the state before its first token.
        write: per row, one slot per token, for the state after that token.

    Returns:
        [T, H, V] float32.
    """
    out = torch.empty_like(v)
    beta = beta.unsqueeze(-1)
    per_token = (g.exp(), k, beta * k, beta * v, q, out)
    tokens = zip(*(x.unsqueeze(2).unbind(0) for x in per_token), strict=True)
    for source, targets in zip(read, write, strict=True):
        state = states[source]
        for target in targets:
            decay, key, beta_key, beta_value, query, output = next(tokens)
            state = torch.mul(state, decay, out=states[target])
            transposed = state.mT
            update = torch.baddbmm(beta_value, beta_key, transposed, alpha=-1)
            state.baddbmm_(update.mT, key)
            torch.bmm(query, transposed, out=output)
    return out


def kda_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, active: list[int]
) -> Tensor:
    """Many rows, many tokens: parallel inside chunks of CHUNK tokens, sequential over the chunks of a row.

    With G the running sum of g inside a chunk and S the state before it, the rank-one updates u_i solve the unit lower
    triangular system

        u_i + beta_i sum_{j<i} <k_i, k_j exp(G_i - G_j)> u_j = beta_i (v_i - S (k_i exp(G_i))).

    Args:
        q, k, g: [B, CHUNK, K]; v: [B, CHUNK, V]; beta: [B, CHUNK, 1]; float32, unused places all zero. B lists the
            first chunks of all row-heads, then the second chunks of those that have one, and so on.
        states: [row-heads, V, K] float32, longest row first; holds the states after the last token on return.
        active: for each round, how many leading row-heads still have a chunk; sums to B.

    Returns:
        [B, CHUNK, V] float32.
    """
    total = g.cumsum(1)
    # exp(G_i - G_j) is split around the chunk's middle, so that neither factor can overflow.
    middle = (total[:, :1] + total[:, -1:]) / 2
    toward = (total - middle).exp_()
    k_away = (k * (middle - total).exp_()).mT
    beta_k = beta * k
    # Only what lies below the diagonal is read of `inner`; above, it may have overflowed.
    inner = torch.bmm(beta_k * toward, k_away)
    attention = torch.bmm(q * toward, k_away).tril_()
    decay = total.exp()
    right = torch.cat([beta * v, beta_k * decay], dim=-1)
    solved = torch.linalg.solve_triangular(inner, right, upper=False, unitriangular=True)
    free, weight = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q_decay = q * decay
    k_left = k * (total[:, -1:] - total).exp_()
    last = decay[:, -1:]

    out = torch.empty_like(v)
    start = 0
    for rows in active:
        part = slice(start, start + rows)
        start += rows
        state = states[:rows]
        transposed = state.mT
        update = torch.baddbmm(free[part], weight[part], transposed, alpha=-1)
        torch.baddbmm(torch.bmm(q_decay[part], transposed), attention[part], update, out=out[part])
        state.mul_(last[part]).baddbmm_(update.mT, k_left[part])
    return out
