# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention (KDA) as math: the gate, the step-by-step recurrence, and its chunked parallel form.

State of one head: S [D, Dv]. With decay g <= 0 per channel and step size beta in (0, 1):

    S <- diag(exp(g)) S;   S <- S + beta k (v - k^T S)^T;   o = S^T q

Shapes below: B sequences, T tokens, H heads, D key channels, Dv value channels.
"""

import torch
from torch import Tensor

CHUNK = 16


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, the epsilon of the deployed kernels."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay per channel in (lower_bound, 0): `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`.

    f: [B, T, H*D]; a_log: [H]; dt_bias: [H*D]. Returns [B, T, H, D] float32.
    """
    x = (f.float() + dt_bias.float()).view(*f.shape[:-1], a_log.numel(), -1)
    return lower_bound * torch.sigmoid(a_log.float().exp()[:, None] * x)


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time.

    q, k, g: [B, T, H, D] float32 (q, k normalized, q scaled); v: [B, T, H, Dv]; beta: [B, T, H];
    state: [B, H, D, Dv]. Returns the outputs [B, T, H, Dv] and the state after the last token.
    """
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhd,bhdv->bhv", k[:, t], state)
        update = beta[:, t].unsqueeze(-1) * error
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def kda_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same function, parallel inside chunks of `CHUNK` tokens; differentiable, for training and prefill.

    With G the running sum of g inside a chunk and S the state before it, the rank-one updates u_i solve the
    unit lower triangular system (UT transform)

        u_i + beta_i sum_{j<i} <k_i, k_j exp(G_i - G_j)> u_j = beta_i (v_i - (k_i exp(G_i))^T S).

    exp(G_i - G_j) is split around the chunk's middle: |G_i - middle| <= CHUNK / 2 * |lower_bound| = 40, so
    both factors stay finite in float32, and a product of factors loses no relative precision.
    """
    tokens = q.shape[1]
    pad = -tokens % CHUNK

    def chunks(x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B, H, N, CHUNK, ...]; padding with g = beta = 0 leaves the state unchanged."""
        if pad:
            x = torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], dim=1)
        return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).movedim(3, 1)

    q, k, v, g, beta = (chunks(x.float()) for x in (q, k, v, g, beta))
    beta = beta.unsqueeze(-1)
    total = g.cumsum(dim=-2)
    middle = (total[..., :1, :] + total[..., -1:, :]) / 2
    k_right = (k * (middle - total).exp()).transpose(-1, -2)
    towards_middle = (total - middle).exp()
    inner = beta * ((k * towards_middle) @ k_right).tril(-1)
    attention = ((q * towards_middle) @ k_right).tril()

    decay = total.exp()
    right_side = torch.cat([beta * v, beta * k * decay], dim=-1)
    identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    solved = torch.linalg.solve_triangular(inner + identity, right_side, upper=False, unitriangular=True)
    u_free, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    q_decay = q * decay
    k_left = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    last_decay = decay[..., -1, :].unsqueeze(-1)
    outputs = []
    per_chunk = (x.unbind(2) for x in (u_free, w, q_decay, attention, k_left, last_decay))
    for u_n, w_n, q_n, attention_n, k_n, decay_n in zip(*per_chunk, strict=True):
        u = u_n - w_n @ state
        outputs.append(q_n @ state + attention_n @ u)
        state = decay_n * state + k_n @ u
    output = torch.stack(outputs, dim=2).movedim(1, 3).flatten(1, 2)
    return output[:, :tokens], state
