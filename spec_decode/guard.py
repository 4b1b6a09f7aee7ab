# SPDX-License-Identifier: Apache-2.0
"""Watches speculation while it runs: is it noise, does its last position pay, does it pay at all? Pure logic.

`draft_chance` is a CUSUM of the log-likelihood ratio between a draft whose first token is accepted 1% of the time
(broken) and one that is accepted 10% of the time (poor, but alive). Each rejected first token adds ln(0.99 / 0.90),
each accepted one takes away ln(10), never below zero; the alarm is raised at 16. A draft that is never accepted gets
there after 168 rounds. Between false alarms lie at least e^16, about nine million, rounds at an acceptance of 10%
(Lorden's bound for CUSUM), and more above.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALIVE, BROKEN = 0.10, 0.01
_REJECTED = math.log((1 - BROKEN) / (1 - ALIVE))
_ACCEPTED = math.log(BROKEN / ALIVE)
_THRESHOLD = 16.0
# Rounds in the window, and how many it must hold before the slower checks judge it.
_WINDOW, _ENOUGH = 2000, 1000
# Share of its proposals below which a position is dead, and above which a dead one lives again: one limit for both
# would log a line at every crossing.
_DEAD, _LIVES = 0.01, 0.03
# Standard errors below break-even before speculation is called slower: one in a million by chance, per window. It is
# over when the window lies clearly above break-even.
_SURE, _OVER = 4.75, 2.0
# Break-even is that of k drafts a round; rounds that draft clearly fewer cost less, and are not judged by it.
_FULL = 0.95

Alarm = Literal["draft_chance", "draft_tail", "draft_slow"]


@dataclass(frozen=True)
class Event:
    """An alarm that was raised, or cleared again; `message` has the figures, the likely cause and the fix."""

    alarm: Alarm
    raised: bool
    message: str


class DraftGuard:
    """Acceptance of one server's drafts, in a window of the last rounds and since the start.

    Args:
        k: draft tokens a round.
        break_even: accept length above which a round is cheaper than plain decoding; None if it is not known, and
            `draft_slow` is then never judged.
    """

    def __init__(self, k: int, break_even: float | None = None) -> None:
        if k < 1:
            raise ValueError(f"k is {k}, expected at least one draft token")
        self.k, self.break_even = k, break_even
        self.rounds, self.accepted = 0, [0] * k
        self._cusum = 0.0
        self._raised: set[Alarm] = set()
        self._forget()

    def _forget(self) -> None:
        self._window: deque[tuple[int, list[int], list[int]]] = deque()
        self._window_rounds = 0
        self._window_accepted, self._window_proposed = [0] * self.k, [0] * self.k

    @property
    def alarms(self) -> frozenset[Alarm]:
        """Alarms that stand."""
        return frozenset(self._raised)

    def accept_length(self) -> float | None:
        """Tokens per round in the window; None before the first round."""
        return 1 + sum(self._window_accepted) / self._window_rounds if self._window_rounds else None

    def acceptance(self) -> list[float] | None:
        """Share of the window's rounds in which each position was accepted; None before the first round."""
        if not self._window_rounds:
            return None
        return [count / self._window_rounds for count in self._window_accepted]

    def observe(
        self,
        rounds: int,
        accepted_per_position: Sequence[int],
        proposed_per_position: Sequence[int] | None = None,
    ) -> list[Event]:
        """One engine step.

        Args:
            rounds: sequences whose drafts were verified.
            accepted_per_position: how many of them accepted position 1, 2, ..., k.
            proposed_per_position: how many of them had a draft token at position 1, 2, ..., k: fewer than `rounds`
                where a draft was cut short or a grammar struck its tokens out; None means all.
        """
        if rounds < 1:
            return []
        counts = [*accepted_per_position, *[0] * self.k][: self.k]
        proposed = [rounds] * self.k
        if proposed_per_position is not None:
            proposed = [*proposed_per_position, *[0] * self.k][: self.k]
        self.rounds += rounds
        self._window_rounds += rounds
        for position, count in enumerate(counts):
            self.accepted[position] += count
            self._window_accepted[position] += count
            self._window_proposed[position] += proposed[position]
        self._window.append((rounds, counts, proposed))
        while self._window_rounds - self._window[0][0] >= _WINDOW:
            old, old_counts, old_proposed = self._window.popleft()
            self._window_rounds -= old
            for position, count in enumerate(old_counts):
                self._window_accepted[position] -= count
                self._window_proposed[position] -= old_proposed[position]
        self._cusum = max(0.0, self._cusum + (proposed[0] - counts[0]) * _REJECTED + counts[0] * _ACCEPTED)
        # A long outage must not take as long to be over.
        self._cusum = min(self._cusum, 2 * _THRESHOLD)
        return [event for event in (self._chance(), self._tail(), self._slow()) if event is not None]

    def _chance(self) -> Event | None:
        bad = self._cusum >= _THRESHOLD or ("draft_chance" in self._raised and self._cusum > 0)
        event = self._turn(
            "draft_chance",
            bad,
            f"drafts are noise: {self._figures()}. Likely the draft's head or layer is broken (vllm-ling doctor --url "
            "names it), or the text is random; restart without --speculative-config until it is mended",
        )
        if event is not None and not event.raised:
            self._forget()  # the window is full of the outage, which says nothing of the tail and the cost now
        return event

    def _tail(self) -> Event | None:
        if self._window_rounds < _ENOUGH or self.k == 1 or "draft_chance" in self._raised:
            return None
        limit = _LIVES if "draft_tail" in self._raised else _DEAD
        dead = 0
        for accepted, proposed in zip(
            reversed(self._window_accepted), reversed(self._window_proposed), strict=True
        ):
            if proposed < _ENOUGH:
                return None  # seldom drafted: unknown
            if accepted >= limit * proposed:
                break
            dead += 1
        return self._turn(
            "draft_tail",
            0 < dead < self.k,
            f"the last {dead} of {self.k} draft positions are practically never accepted: {self._figures()}; set "
            f"num_speculative_tokens to {max(1, self.k - dead)}",
        )

    def _slow(self) -> Event | None:
        if self.break_even is None or self._window_rounds < _ENOUGH or "draft_chance" in self._raised:
            return None
        if sum(self._window_proposed) < _FULL * self.k * self._window_rounds:
            return None
        shares = [count / self._window_rounds for count in self._window_accepted]
        mean = sum(shares)
        square = sum((2 * position + 1) * share for position, share in enumerate(shares))
        error = math.sqrt(max(square - mean**2, 0.0) / self._window_rounds)
        return self._turn(
            "draft_slow",
            1 + mean + (-_OVER if "draft_slow" in self._raised else _SURE) * error < self.break_even,
            f"speculation costs more than it saves: {self._figures()}, break-even at {self.break_even:.2f}; use fewer "
            "draft tokens or leave --speculative-config out",
        )

    def _turn(self, alarm: Alarm, bad: bool, message: str) -> Event | None:
        if bad == (alarm in self._raised):
            return None
        if bad:
            self._raised.add(alarm)
            return Event(alarm, True, message)
        self._raised.discard(alarm)
        return Event(alarm, False, f"over: {self._figures()}")

    def _figures(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.acceptance() or [])
        return f"accept length {self.accept_length() or 0:.2f} over {self._window_rounds} rounds (positions {shares})"
