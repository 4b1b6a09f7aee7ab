# SPDX-License-Identifier: Apache-2.0
"""KDA in plain torch: gate, causal convolution, single steps for decoding and a chunked form for prefill.

Recurrence per head, with state S [V, K], log decay g [K], gain beta, L2-normalized q and k (q also scaled):

    S <- S diag(exp(g));   S <- S + beta (v - S k) k^T;   o = S q
"""

import torch
import torch.nn.functional as F

_CHUNK = 16
# Chunks whose pairwise decays [chunks, heads, 16, 16, K] are held at once.
_CHUNKS_AT_ONCE = 32


def log_decay(
    f: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Per-channel log decay (<= 0) from the f projection.

    Args:
        f: [T, H, K]; a_log: [H]; dt_bias: [H, K].
        lower_bound: safe gate `lower_bound * sigmoid(exp(a_log) * (f + dt_bias))`; None for
            `-exp(a_log) * softplus(f + dt_bias)`.
    """
    x = f.float() + dt_bias
    a = a_log.exp()[:, None]
    return -a * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(a * x)


def causal_conv(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of a depthwise causal convolution.

    Args:
        window: [R, history + L, D], the inputs preceded by `history` = taps - 1 earlier ones.
        weight: [D, taps].

    Returns:
        [R, L, D].
    """
    taps = weight.shape[1]
    length = window.shape[1] - taps + 1
    out = window[:, :length] * weight[:, 0]
    for tap in range(1, taps):
        out = out.addcmul(window[:, tap : tap + length], weight[:, tap])
    return F.silu(out)


def unit(x: torch.Tensor) -> torch.Tensor:
    """L2-normalizes the last dimension as FLA's kernels do (eps inside the root)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for R independent (sequence, head) rows.

    Args:
        state: [R, V, K] float32, left unchanged; q, k, g: [R, K]; v: [R, V]; beta: [R, 1].

    Returns:
        (o [R, V], new state [R, V, K]).
    """
    decayed = state * g.exp()[:, None, :]
    delta = beta * (v - torch.bmm(decayed, k[:, :, None])[..., 0])
    new = decayed.baddbmm_(delta[:, :, None], k[:, None, :])
    return torch.bmm(new, q[:, :, None])[..., 0], new


def chunked(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole prompt of one sequence, chunk by chunk.

    Within a chunk the updates u solve (I + diag(beta) A) u = beta (v - S0 k exp(G)) with
    A[i, j] = sum_d k_i k_j exp(G_i - G_j) for j < i, G the running sum of g; only differences of G are
    exponentiated, so nothing overflows.

    Args:
        state: [H, V, K] float32; q, k, g: [T, H, K]; v: [T, H, V]; beta: [T, H].

    Returns:
        (o [T, H, V], final state [H, V, K]).
    """
    tokens = q.shape[0]
    pad = -tokens % _CHUNK
    # A padding token has beta = 0 and g = 0: it changes no state.
    q, k, v, g = (
        F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(0, (-1, _CHUNK)).transpose(1, 2) for x in (q, k, v, g)
    )
    beta = F.pad(beta, (0, 0, 0, pad)).unflatten(0, (-1, _CHUNK)).transpose(1, 2)[..., None]
    running = g.cumsum(2)
    outputs = []
    strict = torch.ones(_CHUNK, _CHUNK, device=q.device).tril(-1)
    for begin in range(0, q.shape[0], _CHUNKS_AT_ONCE):
        part = slice(begin, begin + _CHUNKS_AT_ONCE)
        total = running[part]
        decay = (total[:, :, :, None] - total[:, :, None]).exp()
        weighted = decay * k[part][:, :, None]
        mixing = (weighted @ k[part][..., None])[..., 0] * strict
        reading = (weighted @ q[part][..., None])[..., 0] * (strict + torch.eye(_CHUNK, device=q.device))
        system = mixing * beta[part] + torch.eye(_CHUNK, device=q.device)
        from_start = total.exp()
        to_end = (total[:, :, -1:] - total).exp()
        for c in range(total.shape[0]):
            i = begin + c
            right = beta[i] * (v[i] - (k[i] * from_start[c]) @ state.transpose(1, 2))
            update = torch.linalg.solve_triangular(system[c], right, upper=False, unitriangular=True)
            outputs.append((q[i] * from_start[c]) @ state.transpose(1, 2) + reading[c] @ update)
            state = state * from_start[c][:, -1:] + update.transpose(1, 2) @ (k[i] * to_end[c])
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens], state
