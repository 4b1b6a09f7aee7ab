# SPDX-License-Identifier: Apache-2.0
"""The draft gate on made-up streams, its replay on traces, and the published comparison."""

import json
import random
from pathlib import Path

import pytest

from vllm_ling.eval.studies.draft_length import MOST, flash_costs, replay
from vllm_ling.eval.studies.draft_traces import Trace
from vllm_ling.spec_decode.gate import Calibration, Costs, DraftGate, Outcome

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


def rounds(
    gate: DraftGate, count: int, chance: float, seed: int = 0, honest: bool = True
) -> list[tuple[int, int]]:
    """(drafted, verified) of rounds whose tokens are each right with `chance`, which the draft knows if `honest`."""
    chooser, found = random.Random(seed), []
    for _ in range(count):
        probabilities = [chance if honest else 0.9] * gate.steps()
        verified = gate.verify(probabilities)
        right = [chooser.random() < chance for _ in probabilities]
        accepted = next((n for n in range(verified) if not right[n]), verified)
        gate.observe([Outcome(probabilities, verified, accepted)])
        found.append((len(probabilities), verified))
    return found


@pytest.mark.parametrize("honest", [True, False])
def test_a_draft_that_becomes_good_is_taken_up_again(honest: bool) -> None:
    gate = DraftGate(COSTS, MOST)
    assert rounds(gate, 600, 0.02, honest=honest)[-1] in ((1, 0), (1, 1))
    assert rounds(gate, 4000, 0.98, honest=honest)[-1] == (MOST, MOST)


def test_a_hopeless_draft_is_still_verified_now_and_then() -> None:
    """Or nobody would notice that it is broken: the guard sees verified tokens only."""
    done = rounds(DraftGate(COSTS, MOST), 2000, 0.0)[200:]
    assert 1 / 40 < sum(verified for _, verified in done) / len(done) < 1 / 10
    assert {verified for _, verified in done} == {0, 1} and {drafted for drafted, _ in done} == {1}


def test_never_longer_than_the_user_allows() -> None:
    gate = DraftGate(COSTS, 2)
    assert {drafted for drafted, _ in rounds(gate, 200, 1.0)} == {2}
    assert gate.verify([1.0, 1.0]) == 2
    for most in (0, MOST + 1):
        with pytest.raises(ValueError, match="expected 1 to"):
            DraftGate(COSTS, most)


def test_break_even_follows_the_costs() -> None:
    """Free verification keeps everything, a price above a token's keeps nothing."""
    free = DraftGate(Costs([0.0, 1.0, 1.0, 1.0], 0.0), 2)
    dear = DraftGate(Costs([0.0, 1.0, 2.5, 4.0], 0.1), 2)
    assert free.verify([0.01, 0.01]) == 2 and dear.verify([0.99, 0.99]) == 0
    assert rounds(free, 50, 0.5)[-1] == (2, 2) and rounds(dear, 50, 0.9)[-1][0] == 1


def test_a_fixed_cost_of_every_round_makes_longer_drafts_pay() -> None:
    plain, slow = DraftGate(COSTS, MOST), DraftGate(COSTS, MOST)
    slow.set_fixed(5 * COSTS.verify[1])
    for gate in (plain, slow):
        rounds(gate, 1500, 0.4)
    assert plain.verify([0.4] * 3) < slow.verify([0.4] * 3)


def test_only_allowed_numbers_are_drafted() -> None:
    gate = DraftGate(COSTS, MOST)
    assert gate.steps([1, 2]) == MOST, "none of them is long enough: all the user allows"
    rounds(gate, 300, 0.0)
    assert gate.steps() == 1 and gate.steps([3, 4]) == 3 and gate.steps([]) == MOST
    assert gate.steps(least=2) == 2


def test_requests_of_a_batch_have_lengths_of_their_own() -> None:
    gate = DraftGate(flash_costs(), MOST)
    sure, unsure = [0.99, 0.98, 0.97, 0.96], [0.05, 0.05, 0.05, 0.05]
    assert gate.allot([sure, unsure, sure]) == [4, 0, 4]
    assert gate.allot([]) == [] and gate.allot([[], []]) == [0, 0]


def test_where_graphs_want_equal_lengths_the_batch_gets_one() -> None:
    gate = DraftGate(COSTS, MOST)
    sure, unsure = [0.99, 0.98, 0.97, 0.96], [0.05, 0.05, 0.05, 0.05]
    (both,) = set(gate.allot([sure, sure], range(MOST + 1)))
    (mixed,) = set(gate.allot([sure, unsure], range(MOST + 1)))
    (none,) = set(gate.allot([unsure, unsure], range(MOST + 1)))
    assert both == 4 and none == 0 and mixed in range(MOST + 1)
    assert set(gate.allot([sure, sure], {0, 2})) == {2}
    assert set(gate.allot([unsure, unsure], {2, 4})) == {2}, "none is no choice: it would have no graph"
    assert set(gate.allot([sure, sure[:3]], range(MOST + 1))) == {3}, "no longer than the shortest"


def test_costs_go_on_beyond_their_table() -> None:
    costs = Costs([0.0, 1.0, 1.5, 1.8], 0.1)
    assert [costs.step(n) for n in (1, 3, 4, 6)] == pytest.approx([1.0, 1.8, 2.1, 2.7])


def test_calibration_follows_a_change() -> None:
    calibration = Calibration()
    for _ in range(5000):
        calibration.observe(0.9, accepted=False)
    for _ in range(1000):
        calibration.observe(0.9, accepted=True)
    assert calibration.chance(0.9) > 0.75


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


@pytest.mark.parametrize("requests", [1, 64, 256])
def test_the_cost_of_a_token_settles_whatever_the_batch(requests: int) -> None:
    """As many requests a round as a server admits by default must not make the running average swing."""
    costs = Costs([0.0, *(10.0 + n for n in range(1, 1100))], 1.0)
    gate = DraftGate(costs, MOST)
    for _ in range(600):
        gate.observe([Outcome([0.9], 1, 1)] * requests)
    exact = (costs.step(2 * requests) + costs.draft) / (2 * requests)
    assert gate._per_token == pytest.approx(exact, rel=0.02)
