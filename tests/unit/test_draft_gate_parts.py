# SPDX-License-Identifier: Apache-2.0
"""The parts between the draft gate and a server: what the draft tells, what rounds took, who waits for what."""

import random
from collections.abc import Callable, Collection

import pytest
import torch

from vllm_ling.spec_decode.confidence import DraftConfidence
from vllm_ling.spec_decode.gate import Costs, DraftGate, Outcome
from vllm_ling.spec_decode.guard import DraftGuard
from vllm_ling.spec_decode.round_times import RoundTimes
from vllm_ling.spec_decode.served_gate import ServedGate

COSTS = Costs([0.0, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5], 0.5)
K = 3


def test_confidence_holds_the_best_probabilities_of_the_last_steps_in_order() -> None:
    register = DraftConfidence(4, K)
    steps = [torch.randn(2, 50) * 3 for _ in range(K + 2)]
    for logits in steps:
        register.note(logits.to(torch.bfloat16))
    found = torch.tensor(register.read(2, K))
    wanted = torch.stack(
        [logits.to(torch.bfloat16).float().softmax(-1).amax(-1) for logits in steps[-K:]], -1
    )
    torch.testing.assert_close(found, wanted)
    assert register.read(2, 1) == [[row[-1]] for row in register.read(2, K)]


def test_confidence_of_a_reduced_vocabulary_and_of_a_profile_run() -> None:
    register = DraftConfidence(2, K)
    logits = torch.full((1, 8), -torch.inf)
    logits[0, :2] = 0.0
    register.note(logits)
    register.note(torch.zeros(3, 8))  # more rows than requests: not a draft
    assert register.read(1, 1) == [[0.5]]


def times_of(fixed: float, slope: float, lengths: Collection[int], noise: float = 0.02) -> RoundTimes:
    times, chooser = RoundTimes(), random.Random(0)
    for _ in range(3000):
        cost = COSTS.step(chooser.choice(list(lengths)))
        times.add(cost, (fixed + slope * cost) * chooser.uniform(1 - noise, 1 + noise))
    return times


def test_fixed_time_is_found_in_bytes() -> None:
    assert times_of(3.0, 0.5, (1, 2, 3, 4)).fixed() == pytest.approx(6.0, rel=0.1)
    assert times_of(0.0, 0.5, (1, 2, 3, 4)).fixed() == pytest.approx(0.0, abs=0.3)


def test_fixed_time_is_not_guessed() -> None:
    assert RoundTimes().fixed() == 0.0
    assert times_of(3.0, 0.5, (4,)).fixed() == 0.0, "one length cannot tell"


def test_times_that_do_not_depend_on_bytes_make_bytes_cheap() -> None:
    assert times_of(3.0, 0.0, (1, 4), noise=0.001).fixed() > 10 * COSTS.step(4)


def test_a_pause_is_no_round() -> None:
    times = times_of(3.0, 0.5, (1, 2, 3, 4))
    before = times.fixed()
    for _ in range(20):
        times.add(COSTS.step(1), 1000.0)
    assert times.fixed() == before


class Draft:
    """Stands in for `DraftConfidence.read`."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def __call__(self, requests: int, steps: int) -> list[list[float]]:
        return [row[:steps] for row in self.rows[:requests]]


class Spy(DraftGate):
    def __init__(self) -> None:
        super().__init__(COSTS, K)
        self.seen: list[list[tuple[int, int, int]]] = []
        self.fixed: list[float] = []

    def observe(self, batch) -> None:  # type: ignore[no-untyped-def]
        self.seen.append([(len(o.probabilities), o.verified, o.accepted) for o in batch])
        super().observe(batch)

    def set_fixed(self, fixed: float) -> None:
        self.fixed.append(fixed)


def served(**limits) -> tuple[ServedGate, Spy, Draft]:  # type: ignore[no-untyped-def]
    gate, draft = Spy(), Draft()
    return ServedGate(gate, COSTS, draft, **limits), gate, draft


def test_a_request_from_its_prompt_on() -> None:
    server, gate, draft = served()
    assert server.begin({"a": 20}, {}, []) == K
    server.end({"a": [7]})
    draft.rows = [[0.99, 0.98, 0.01]]
    assert server.trim(["a"], [[1, 2, 3]]) == [[1, 2]]
    server.begin({"a": 3}, {"a": [1, 2]}, [])
    server.end({"a": [1, 9]})
    assert gate.seen == [[], [(3, 2, 1)]]


def test_what_the_scheduler_cut_further_is_what_counts() -> None:
    server, gate, draft = served()
    draft.rows = [[0.99] * K]
    assert server.trim(["a"], [[1, 2, 3]]) == [[1, 2, 3]]
    server.begin({"a": 2}, {"a": [1]}, [])  # a grammar refused the second
    server.end({"a": [1, 5]})
    assert gate.seen == [[(3, 1, 1)]]


def test_a_round_beside_a_prompt_teaches_and_is_not_timed() -> None:
    times = RoundTimes()
    times.add = lambda cost, seconds: pytest.fail("timed")  # type: ignore[method-assign]
    server, gate, draft = served(times=times)
    draft.rows = [[0.99] * K]
    server.trim(["a"], [[1, 2, 3]])
    server.begin({"a": 4, "b": 30}, {"a": [1, 2, 3]}, [])
    server.end({"a": [1, 2, 3, 4], "b": [5]})
    server.begin({"c": 4}, {}, [])
    assert gate.seen == [[(3, 3, 3)]]


def test_placeholders_of_the_scheduler_teach_nothing() -> None:
    """vLLM pads a one-token prompt beside decodes to the length of a verification."""
    server, gate, _ = served()
    server.begin({"a": 4}, {"a": [-1, -1, -1]}, [])
    server.end({"a": [1]})
    assert gate.seen == [[]]


def test_a_request_that_is_gone_or_comes_again_is_forgotten() -> None:
    server, gate, draft = served()
    draft.rows = [[0.99] * K] * 2
    server.trim(["a", "b"], [[1, 2, 3], [4, 5, 6]])
    # a is aborted; b is thrown out and reads its prompt again, then a new request takes a's name.
    server.begin({"b": 12, "a": 4}, {"a": [-1, -1, -1]}, ["a"])
    server.end({"b": [1], "a": [1]})
    assert gate.seen == [[]]


def test_nothing_drafted_is_nothing_trimmed() -> None:
    server, _, _ = served()
    assert server.trim([], []) == [] and server.trim(["a"], [[]]) == [[]]


def test_limits_of_the_graphs_are_kept() -> None:
    server, gate, draft = served(steps=lambda requests: [3], lengths=lambda requests: [2, 3])
    for _ in range(300):
        draft.rows = [[0.01] * K]
        assert server.trim(["a"], [[1, 2, 3]]) == [[1, 2]]
        assert server.begin({"a": 3}, {"a": [1, 2]}, []) == 3
        server.end({"a": [9]})
    assert gate.steps() == 1


def test_a_step_without_tokens_ends_requests_and_the_row_of_rounds() -> None:
    now = 0.0
    times = RoundTimes()
    added: list[float] = []
    times.add = lambda cost, seconds: added.append(seconds)  # type: ignore[method-assign]
    server, _, draft = served(times=times, clock=lambda: now)
    draft.rows = [[0.99] * K]
    server.trim(["a"], [[1, 2, 3]])
    server.rest(["a"])
    assert not server._drafted, "a server must not keep what nobody asks for again"
    for pause in (False, True, False):
        server.trim(["b"], [[1, 2, 3]])
        if pause:
            server.rest([])
        now += 50.0 if pause else 2.0
        server.begin({"b": 4}, {"b": [1, 2, 3]}, [])
    assert added == [2.0], "a pause is no round"


def test_rounds_are_timed_from_start_to_start() -> None:
    now = 0.0
    times = RoundTimes()
    added: list[tuple[float, float]] = []
    times.add = lambda cost, seconds: added.append((cost, seconds))  # type: ignore[method-assign]
    server, _, draft = served(times=times, clock=lambda: now)
    draft.rows = [[0.99] * K]
    server.begin({"a": 20}, {}, [])
    server.end({"a": [1]})
    for _ in range(3):
        server.trim(["a"], [[1, 2, 3]])
        now += 2.0
        server.begin({"a": 4}, {"a": [1, 2, 3]}, [])
        server.end({"a": [1, 2, 3, 4]})
    assert added == [(COSTS.step(4) + K * COSTS.draft, 2.0)] * 2, (
        "the prompt's step is none, nor is the last yet"
    )


def guarded(rounds: int, chance: Callable[[random.Random], float], honest: bool) -> list[tuple[int, str]]:
    """Alarms of the guard, by round, over what a gate verified; each token is right with `chance`."""
    chooser, alarms = random.Random(0), []
    gate, guard = DraftGate(COSTS, K), DraftGuard(K, break_even=1.6)
    for number in range(rounds):
        steps = gate.steps()
        chances = [chance(chooser) for _ in range(steps)]
        probabilities = chances if honest else [chooser.random() for _ in range(steps)]
        verified = gate.verify(probabilities)
        accepted = next((n for n in range(verified) if chooser.random() >= chances[n]), verified)
        gate.observe([Outcome(probabilities, verified, accepted)])
        if verified:  # as vLLM counts
            events = guard.observe(
                1, [int(n < accepted) for n in range(K)], [int(n < verified) for n in range(K)]
            )
            alarms += [(number, event.alarm) for event in events if event.raised]
    return alarms


@pytest.mark.parametrize(
    "chance",
    [
        lambda chooser: chooser.choice([0.1, 0.9]),
        lambda chooser: 0.3 * chooser.random(),
        lambda chooser: 0.98,
        lambda chooser: 0.55,
    ],
    ids=["unsure of half", "hard", "easy", "even"],
)
def test_gating_raises_no_alarm(chance: Callable[[random.Random], float]) -> None:
    assert guarded(20_000, chance, honest=True) == []


def test_a_broken_draft_is_noticed_behind_the_gate() -> None:
    """Later than without a gate, in rounds: few of its tokens are verified, so it also does less harm."""
    (first, alarm), *_ = guarded(5_000, lambda chooser: 0.0, honest=False)
    assert alarm == "draft_chance" and 160 < first < 4_000
