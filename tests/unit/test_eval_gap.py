# SPDX-License-Identifier: Apache-2.0
"""The gap between synthetic and real gains: the factors multiply to the whole, and each cause shows in its own."""

import math

import pytest

from vllm_ling.eval.ablation.gap import Load, explain_gap, gain

BASE = Load(ttft_s=0.2, tokens=400, tpot_s=0.025)


def product(found: object) -> float:
    return math.prod(
        getattr(found, name) for name in ("accept_length", "step_time", "fixed_time", "output_length")
    )


@pytest.mark.parametrize(
    "run",
    [
        Load(0.2, 400, 0.025 * 1.3 / 2.68, 2.68),
        Load(0.4, 300, 0.010, 3.9),
        Load(0.1, 900, 0.030, 1.0),
    ],
)
def test_factors_multiply_to_the_gain(run: Load) -> None:
    found = gain(BASE, run)
    assert found.total == pytest.approx(BASE.latency_s / run.latency_s)
    assert product(found) == pytest.approx(found.total)


def test_each_cause_shows_in_its_own_factor() -> None:
    free = Load(0.0, 100, 0.02)
    assert gain(free, Load(0.0, 100, 0.01, 2.0)).accept_length == 2.0
    slower_step = gain(free, Load(0.0, 100, 0.0125, 2.0))
    assert (slower_step.step_time, slower_step.fixed_time) == (pytest.approx(0.8), pytest.approx(1.0))
    assert gain(free, Load(0.0, 50, 0.02)).output_length == pytest.approx(2.0)
    half_fixed = gain(Load(2.0, 100, 0.02), Load(2.0, 100, 0.01, 2.0))
    assert half_fixed.total == pytest.approx(4 / 3) and half_fixed.fixed_time == pytest.approx(2 / 3)


def test_the_gap_of_the_study() -> None:
    """Accept length 3.90 on random tokens and 2.68 on real text at the same step time: the gap is theirs alone."""
    step = 0.0268
    synthetic = gain(Load(0, 2000, 0.0268), Load(0, 2000, step / 3.90, 3.90))
    real = gain(Load(0, 400, 0.0268), Load(0, 400, step / 2.68, 2.68))
    found = explain_gap(synthetic, real)
    assert found["total"] == pytest.approx(2.68 / 3.90) == found["accept_length"]
    assert [found[name] for name in ("step_time", "fixed_time", "output_length")] == pytest.approx([1, 1, 1])
