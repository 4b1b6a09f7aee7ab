# SPDX-License-Identifier: Apache-2.0
"""The chunked KDA is the recurrence, in values, final state and gradients, also at the gate's extremes."""

import pytest
import torch
from torch import Tensor

from vllm_ling.reference.kda import kda_chunked, kda_gate, kda_recurrent, l2_normalize


def _inputs(tokens: int, gate: str) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens)
    heads, dim = 2, 32
    q, k, v = (torch.randn(2, tokens, heads, dim) for _ in range(3))
    g = {
        "spread": -5 * torch.sigmoid(3 * torch.randn(2, tokens, heads, dim)),
        "forgets": torch.full((2, tokens, heads, dim), -5.0),
        "keeps": torch.full((2, tokens, heads, dim), -1e-4),
    }[gate]
    beta = torch.sigmoid(2 * torch.randn(2, tokens, heads))
    return l2_normalize(q), l2_normalize(k), v, g, beta, torch.randn(2, heads, dim, dim)


@pytest.mark.parametrize("gate", ["spread", "forgets", "keeps"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 50])
def test_chunked_equals_recurrence(tokens: int, gate: str) -> None:
    inputs = _inputs(tokens, gate)
    for chunked, recurrent in zip(kda_chunked(*inputs), kda_recurrent(*inputs), strict=True):
        torch.testing.assert_close(chunked, recurrent, atol=1e-4, rtol=1e-4)


def test_gradients_agree() -> None:
    gradients = []
    for form in (kda_chunked, kda_recurrent):
        inputs = [t.clone().requires_grad_() for t in _inputs(20, "spread")]
        out, state = form(*inputs)
        (out.square().sum() + state.sum()).backward()
        gradients.append([t.grad for t in inputs])
    for chunked, recurrent in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, recurrent, atol=1e-3, rtol=1e-3)


def test_gate_formula_and_bounds() -> None:
    f, a_log, bias = torch.randn(1, 3, 8) * 50, torch.tensor([0.0, 1.0]), torch.randn(8)
    g = kda_gate(f, a_log, bias, -5.0)
    assert g.shape == (1, 3, 2, 4)
    assert float(g.min()) >= -5.0 and float(g.max()) <= 0.0
    expected = -5.0 / (1 + torch.exp(-torch.e * (f[0, 1, 6] + bias[6])))
    torch.testing.assert_close(g[0, 1, 1, 2], expected)


def test_one_step_by_hand() -> None:
    """S = diag(e^g) S0, then the delta rule: with beta = 1 the new state maps k to v exactly."""
    k = l2_normalize(torch.tensor([3.0, 4.0])).view(1, 1, 1, 2)
    v = torch.tensor([7.0, -2.0]).view(1, 1, 1, 2)
    g = torch.tensor([-1.0, -0.5]).view(1, 1, 1, 2)
    out, state = kda_recurrent(k, k, v, g, torch.ones(1, 1, 1), torch.randn(1, 1, 2, 2))
    torch.testing.assert_close(out, v, atol=1e-4, rtol=1e-4)
    assert state.shape == (1, 1, 2, 2)
