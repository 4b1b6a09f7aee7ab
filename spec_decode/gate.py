# SPDX-License-Identifier: Apache-2.0
"""Draft length earned: draft and verify one token more only while it is expected to save traffic.

Every verified token of a mixture of experts reads experts of its own, so a draft token pays only if the chance that it
and all before it are accepted exceeds its marginal cost over the cost of an emitted token. Both costs come from the
caller (bytes, or measured milliseconds); chances come from the draft's probabilities, calibrated by what was accepted.

How many tokens to draft is decided before a round, by what each position was worth lately; how many of them to verify
is decided after drafting, by their own chances. Pure logic: no tensors, no vLLM.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

_BINS = 10
# A bin believes the draft's probability as if it had seen it confirmed this often, and forgets half of what it saw
# when it has seen this much: text changes.
_PRIOR = 4.0
_FULL = 400.0
# Weight of a round in the running averages: about the last hundred rounds count for costs, the last ten for positions.
_RECENT, _LATELY = 0.01, 0.1
# The position after the last drafted one is judged as if its token were this much less sure than the last.
_NEXT = 0.9
# Rounds that would verify nothing in a row, until one token is verified all the same: what is never tried is never
# learned, and a broken draft would go unnoticed.
_TRY = 16


@dataclass(frozen=True)
class Costs:
    """`verify[n]`: a target step over n tokens (n >= 1; index 0 unused); `draft`: one draft step. Any one unit.

    A batch counts the tokens of all its requests. Beyond the end of `verify` its last step goes on.
    """

    verify: Sequence[float]
    draft: float

    @property
    def longest(self) -> int:
        """The most draft tokens of one request that `verify` has a cost for."""
        return len(self.verify) - 2

    def step(self, tokens: int) -> float:
        """Cost of a target step over `tokens` tokens."""
        over = max(0, tokens - len(self.verify) + 1)
        return self.verify[tokens - over] + over * (self.verify[-1] - self.verify[-2])


@dataclass
class Calibration:
    """Acceptance by the draft's probability: counts in ten bins, each with a prior that trusts the probability."""

    seen: list[float] = field(default_factory=lambda: [0.0] * _BINS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * _BINS)

    def chance(self, probability: float) -> float:
        """Estimated acceptance of a draft token that the draft gives `probability`."""
        place = self._bin(probability)
        return (self.accepted[place] + _PRIOR * probability) / (self.seen[place] + _PRIOR)

    def observe(self, probability: float, accepted: bool) -> None:
        """One draft token whose predecessors were all accepted."""
        place = self._bin(probability)
        if self.seen[place] >= _FULL:
            self.seen[place] /= 2
            self.accepted[place] /= 2
        self.seen[place] += 1
        self.accepted[place] += accepted

    @staticmethod
    def _bin(probability: float) -> int:
        return min(int(probability * _BINS), _BINS - 1)


@dataclass(frozen=True)
class Outcome:
    """One request's part of a round.

    Attributes:
        probabilities: the draft's own, one per draft step made.
        verified: how many of the drafted tokens were verified.
        accepted: how many of those were accepted; the round then gave one token more, the target's own.
    """

    probabilities: Sequence[float]
    verified: int
    accepted: int


class DraftGate:
    """Decides the draft length round by round; one per server, as its calibration is worth sharing between requests.

    Args:
        costs: of verification and drafting; for one request `costs.longest` is never exceeded.
        most: the user's number of draft tokens.
    """

    def __init__(self, costs: Costs, most: int) -> None:
        if not 1 <= most <= costs.longest:
            raise ValueError(f"most is {most}, expected 1 to {costs.longest}")
        self._costs, self._most = costs, most
        self._calibration = Calibration()
        # Of a round, whatever it verifies; learned from times, 0 where costs are bytes.
        self._fixed = 0.0
        # What an emitted token costs; at first what it costs without speculation, which lets drafting start.
        self._per_token = costs.verify[1]
        # What verifying each position saved lately, on average over the rounds that drafted it.
        self._worth = [self._per_token] * most
        self._idle = 0

    def set_fixed(self, fixed: float) -> None:
        """The part of a round's cost that does not depend on its tokens, in the unit of the costs."""
        self._fixed = fixed

    def steps(self, allowed: Collection[int] | None = None, least: int = 1) -> int:
        """How many tokens to draft in the next round, 1 to `most`.

        Args:
            allowed: numbers that can be drafted, None for all; the next larger one is taken.
            least: fewer cannot be verified.
        """
        wanted = min(max(1, least), self._most)
        while wanted < self._most and self._worth[wanted] > self._costs.draft:
            wanted += 1
        if allowed is None:
            return wanted
        return min((number for number in allowed if number >= wanted), default=self._most)

    def chances(self, probabilities: Sequence[float]) -> list[float]:
        """For each draft token the chance that it and all before it are accepted."""
        product, found = 1.0, []
        for probability in probabilities:
            product *= self._calibration.chance(probability)
            found.append(product)
        return found

    def verify(self, probabilities: Sequence[float]) -> int:
        """How many of one request's draft tokens to verify; for several requests see `allot`."""
        return self.allot([probabilities])[0]

    def allot(self, batch: Sequence[Sequence[float]], allowed: Collection[int] | None = None) -> list[int]:
        """How many draft tokens of each request to verify: those that together save most.

        Args:
            batch: the draft's probabilities of each request's tokens.
            allowed: lengths that all requests must share, where CUDA graphs exist only for batches of equal lengths;
                None lets every request have its own.
        """
        chances = [self.chances(request) for request in batch]
        chosen = self._ragged(chances) if allowed is None or not chances else self._equal(chances, allowed)
        if any(chosen) or not any(chances):
            self._idle = 0
            return chosen
        self._idle += 1
        if self._idle > _TRY:
            self._idle = 0
            shortest = min((number for number in allowed or [1] if number), default=0)
            return [min(shortest, len(request)) for request in chances]
        return chosen

    def _ragged(self, chances: list[list[float]]) -> list[int]:
        # Chances only fall along a request, so the best of all tokens are a beginning of each request.
        ranked = sorted(
            (-chance, request, index)
            for request, row in enumerate(chances)
            for index, chance in enumerate(row)
        )
        best, best_at, worth = 0.0, 0, 0.0
        base = self._costs.step(len(chances))
        for count, (chance, _, _) in enumerate(ranked, 1):
            worth -= chance * self._per_token
            gain = worth - (self._costs.step(len(chances) + count) - base)
            if gain > best:
                best, best_at = gain, count
        chosen = [0] * len(chances)
        for _, request, _ in ranked[:best_at]:
            chosen[request] += 1
        return chosen

    def _equal(self, chances: list[list[float]], allowed: Collection[int]) -> list[int]:
        requests, longest = len(chances), min(map(len, chances))
        best, best_at = -math.inf, longest
        base = self._costs.step(requests)
        for length in sorted(allowed):
            if length > longest:
                break
            worth = self._per_token * sum(sum(row[:length]) for row in chances)
            gain = worth - (self._costs.step(requests * (length + 1)) - base)
            if gain > best:
                best, best_at = gain, length
        return [best_at] * requests

    def observe(self, batch: Sequence[Outcome]) -> None:
        """The outcome of a round; `batch` holds every request of it."""
        if not batch:
            return
        for outcome in batch:
            for index in range(min(outcome.accepted + 1, outcome.verified)):
                self._calibration.observe(outcome.probabilities[index], index < outcome.accepted)
        self._judge_positions([outcome.probabilities for outcome in batch if outcome.probabilities])
        drafted = max(len(outcome.probabilities) for outcome in batch)
        cost = self._fixed + self._costs.draft * drafted
        cost += self._costs.step(sum(outcome.verified + 1 for outcome in batch))
        emitted = sum(outcome.accepted + 1 for outcome in batch)
        # By request: a large batch must not count for more than one round does.
        self._per_token += _RECENT * (cost - emitted * self._per_token) / len(batch)

    def _judge_positions(self, batch: list[Sequence[float]]) -> None:
        """What verifying each position was expected to save: never less than nothing, as it can be left out.

        The position after the last drafted one has no token; its chance is guessed, so that it can earn its place.
        """
        requests, totals = len(batch), [0.0] * self._most
        reached = max(map(len, batch), default=-1) + 1
        for probabilities in batch:
            chances = self.chances(probabilities)
            chances.append(chances[-1] * self._calibration.chance(probabilities[-1]) * _NEXT)
            for index, chance in enumerate(chances[: self._most]):
                totals[index] += chance
        for index, total in enumerate(totals[:reached]):
            before = requests * (index + 1)
            marginal = self._costs.step(before + requests) - self._costs.step(before)
            worth = max(0.0, total * self._per_token - marginal)
            self._worth[index] += _LATELY * (worth - self._worth[index])
