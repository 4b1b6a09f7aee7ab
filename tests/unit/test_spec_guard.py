# SPDX-License-Identifier: Apache-2.0
"""The guard on made-up rounds: never on living drafts, soon on broken ones, one line each."""

import random
import time

import pytest

from vllm_ling.spec_decode.guard import DraftGuard, Event


def feed(
    guard: DraftGuard, rates: list[float], rounds: int, seed: int = 0, batch: int = 1
) -> list[tuple[int, Event]]:
    """Rounds whose i-th draft token is accepted with rates[i], given the ones before it; events with their round."""
    chooser, found = random.Random(seed), []
    for at in range(0, rounds, batch):
        counts = [0] * guard.k
        for _ in range(batch):
            for position, rate in enumerate(rates):
                if chooser.random() >= rate:
                    break
                counts[position] += 1
        found += [(at + batch, event) for event in guard.observe(batch, counts)]
    return found


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("rate", [0.9, 0.74, 0.3, 0.15, 0.10])
def test_living_drafts_are_never_called_noise(k: int, rate: float) -> None:
    """20,000 rounds each; at an acceptance of 10% a false alarm is expected every nine million rounds."""
    assert not [
        event for _, event in feed(DraftGuard(k), [rate] * k, 20_000) if event.alarm == "draft_chance"
    ]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("rate", "within"), [(0.0, 200), (0.001, 200), (0.005, 500)])
def test_broken_drafts_are_found(rate: float, within: int, batch: int) -> None:
    for seed in range(10):
        events = feed(DraftGuard(3), [rate] * 3, 2_000, seed, batch)
        at, event = events[0]
        assert event.alarm == "draft_chance" and event.raised and at <= within + batch
        assert "noise" in event.message and "--speculative-config" in event.message


def test_broken_after_a_good_start_is_found_as_soon() -> None:
    guard = DraftGuard(3)
    assert not feed(guard, [0.9] * 3, 5_000)
    assert feed(guard, [0.0] * 3, 200)[0][1].alarm == "draft_chance"


def test_one_line_when_it_starts_and_one_when_it_is_over() -> None:
    guard = DraftGuard(3)
    events = feed(guard, [0.0] * 3, 5_000) + feed(guard, [0.9] * 3, 5_000)
    chance = [event.raised for _, event in events if event.alarm == "draft_chance"]
    assert chance == [True, False] and not guard.alarms


def test_a_dead_tail_names_the_better_length() -> None:
    events = feed(DraftGuard(4), [0.9, 0.8, 0.001, 0.5], 3_000)
    assert [event.alarm for _, event in events] == ["draft_tail"]
    assert "num_speculative_tokens to 2" in events[0][1].message
    assert not feed(DraftGuard(4), [0.9, 0.8, 0.3, 0.5], 20_000)


def test_slower_than_plain_decoding() -> None:
    """k = 3 of Ling-3.0-flash reads about twice the bytes of plain decoding."""
    assert not feed(DraftGuard(3, break_even=1.97), [0.74] * 3, 20_000)
    events = feed(DraftGuard(3, break_even=1.97), [0.4] * 3, 3_000)
    assert [event.alarm for _, event in events] == ["draft_slow"] and "break-even at 1.97" in events[0][
        1
    ].message
    assert not feed(DraftGuard(3), [0.4] * 3, 3_000), "without a known break-even it is not judged"
    close = DraftGuard(1, break_even=1.5)
    assert not feed(close, [0.5], 20_000), "at break-even it is no alarm"


def test_recovery_raises_nothing_else() -> None:
    guard = DraftGuard(3, break_even=1.97)
    events = feed(guard, [0.0] * 3, 5_000) + feed(guard, [0.9] * 3, 5_000, seed=1)
    assert [(event.alarm, event.raised) for _, event in events] == [
        ("draft_chance", True),
        ("draft_chance", False),
    ]


@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.0222], [0.5, 0.5, 0.5]])
def test_no_flood_at_a_limit(rates: list[float]) -> None:
    """Position 3 at 1% of the rounds, or accept length at 4.75 standard errors below break-even: 180 and 363 onsets
    in so many rounds with one limit for on and off."""
    assert len(feed(DraftGuard(3, break_even=1.97), rates, 100_000)) <= 4


def test_draft_tokens_that_were_not_proposed_are_not_rejections() -> None:
    guard = DraftGuard(3, break_even=1.97)
    assert not [event for _ in range(3_000) for event in guard.observe(1, [0, 0, 0], [0, 0, 0])]
    gated = DraftGuard(3, break_even=1.97)  # one draft token a round, accepted four times in five
    assert not [event for at in range(3_000) for event in gated.observe(1, [at % 5 > 0, 0, 0], [1, 0, 0])]


def test_figures() -> None:
    guard = DraftGuard(3)
    assert guard.accept_length() is None and guard.acceptance() is None
    guard.observe(4, [3, 2, 1])
    assert guard.accept_length() == 2.5 and guard.acceptance() == [0.75, 0.5, 0.25]
    for _ in range(5_000):
        guard.observe(1, [1, 0, 0])
    assert guard.accept_length() == 2.0 and guard.rounds == 5_004 and guard.accepted == [5_003, 2, 1]
    assert guard.observe(0, [0, 0, 0]) == []
    with pytest.raises(ValueError, match="k is 0"):
        DraftGuard(0)


@pytest.mark.clock
def test_overhead_is_small_beside_a_step() -> None:
    """About 8 us: half a percent of a step of 1.6 ms. The bound leaves room for a busy machine."""
    guard = DraftGuard(3, break_even=1.97)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(2_000):
            guard.observe(1, (1, 1, 0))
        best = min(best, (time.perf_counter() - began) / 2_000)
    assert best < 20e-6
    print(f"{best * 1e6:.1f} us a step")
