# SPDX-License-Identifier: Apache-2.0
"""The draft gate on made-up streams, its replay on traces, and the published comparison."""

import json
import random
from pathlib import Path

import pytest

from vllm_ling.eval.studies.draft_length import MOST, flash_costs, replay
from vllm_ling.eval.studies.draft_traces import Trace
from vllm_ling.spec_decode.gate import Calibration, Costs, DraftGate

COSTS = flash_costs()
RESULT = Path("eval/results/draft-length.json")


def stream(
    acceptance: list[float], sure: bool, texts: int = 40, length: int = 120, seed: int = 0
) -> list[Trace]:
    """Texts whose i-th draft token is right with probability acceptance[i], given the ones before it; the draft's own
    probability either tells the truth token by token (`sure`) or is the same for all."""
    chooser = random.Random(seed)
    found = []
    for _ in range(texts):
        tokens = list(range(length))
        drafts, probs = [], []
        for last in range(length):
            row, chances = [], []
            for index, rate in enumerate(acceptance):
                right = chooser.random() < rate
                row.append(last + 1 + index if right else -1)
                chances.append((0.95 if right else 0.05) if sure else rate)
            drafts.append(row)
            probs.append(chances)
        found.append(Trace(4, tokens, drafts, probs))
    return found


@pytest.mark.parametrize("sure", [True, False], ids=["confidence tells", "confidence is flat"])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.74, 0.9, 0.99])
def test_gated_is_at_least_as_good_as_the_best_fixed_length(rate: float, sure: bool) -> None:
    texts = stream([rate] * MOST, sure)
    fixed = min(replay("made", f"k{k}", texts, COSTS).bytes_per_token for k in range(1, MOST + 1))
    gated = replay("made", "gated", texts, COSTS).bytes_per_token
    # With flat confidence there is nothing to gain, and learning the rate costs a little.
    assert gated <= fixed * (1.0 if sure else 1.02)


def test_hopeless_drafts_are_given_up() -> None:
    row = replay("made", "gated", stream([0.0] * MOST, sure=False), COSTS)
    assert row.accept_length == 1.0 and row.verified < 0.1
    assert row.bytes_per_token < replay("made", "k1", stream([0.0] * MOST, sure=False), COSTS).bytes_per_token


def test_a_draft_that_becomes_good_is_taken_up_again() -> None:
    gate = DraftGate(COSTS, MOST)
    for _ in range(400):
        gate.observe([0.1], 1, 0)
    assert gate.verify([gate.chance(0.1)]) == 0
    rounds = 0
    while not gate.draft_more([]) and rounds < 5000:
        gate.observe([], 0, 0)
        rounds += 1
    assert rounds < 1000, "never tried again"


def test_never_longer_than_the_user_allows() -> None:
    gate = DraftGate(COSTS, 2)
    assert not gate.draft_more([1.0, 1.0]) and gate.draft_more([1.0])
    assert gate.verify([1.0, 1.0]) == 2
    for most in (0, MOST + 1):
        with pytest.raises(ValueError, match="expected 1 to"):
            DraftGate(COSTS, most)


def test_break_even_follows_the_costs() -> None:
    """Free verification keeps everything, a price above a token's keeps nothing."""
    free = DraftGate(Costs([0.0, 1.0, 1.0, 1.0], 0.0), 2)
    dear = DraftGate(Costs([0.0, 1.0, 2.5, 4.0], 0.1), 2)
    assert free.verify([0.01, 0.01]) == 2 and dear.verify([0.99, 0.99]) == 0
    assert free.draft_more([0.01]) and not dear.draft_more([])


def test_calibration_learns_overconfidence() -> None:
    calibration = Calibration()
    assert calibration.chance(0.95) == pytest.approx(0.95)
    for index in range(200):
        calibration.observe(0.95, index % 2 == 0)
    assert 0.45 < calibration.chance(0.95) < 0.55
    assert calibration.chance(0.25) == pytest.approx(0.25), "other bins are left alone"


def test_fixed_lengths_cost_what_the_byte_model_says() -> None:
    row = replay("made", "k3", stream([1.0] * MOST, sure=True, texts=1, length=401), COSTS)
    per_round = 3 * COSTS.draft + COSTS.verify[4]
    assert row.accept_length == pytest.approx(4.0) and row.bytes_per_token == pytest.approx(per_round / 4)


def test_published_comparison() -> None:
    data = json.loads(RESULT.read_text())
    rows = {(row["set"], row["policy"]): row["bytes_per_token"] for row in data["rows"]}
    assert {policy for _, policy in rows} == {"k1", "k2", "k3", "k4", "gated"}
    for name in ("held_out", "hard"):
        assert rows[name, "gated"] <= min(rows[name, f"k{k}"] for k in range(1, 5))
    assert rows["hard", "gated"] <= 0.92 * rows["hard", "k3"]
