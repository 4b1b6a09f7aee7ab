# SPDX-License-Identifier: Apache-2.0
"""Draft length earned: draft and verify one token more only while it is expected to save traffic.

Every verified token of a mixture of experts reads experts of its own, so a draft token pays only if the chance that it
and all before it are accepted exceeds its marginal cost over the cost of an emitted token. Both costs come from the
caller (bytes, or measured milliseconds); chances come from the draft's probabilities, calibrated by what was accepted.
Pure logic: no tensors, no vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_BINS = 10
# A bin believes the draft's probability as if it had seen it confirmed this often.
_PRIOR = 4.0
# Weight of a round in the running averages: about the last hundred rounds count.
_RECENT = 0.01


@dataclass(frozen=True)
class Costs:
    """`verify[n]`: a target step over n tokens (n >= 1; index 0 unused); `draft`: one draft step. Any one unit."""

    verify: Sequence[float]
    draft: float

    @property
    def longest(self) -> int:
        """The most draft tokens that `verify` has a cost for."""
        return len(self.verify) - 2


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
        self.seen[place] += 1
        self.accepted[place] += accepted

    @staticmethod
    def _bin(probability: float) -> int:
        return min(int(probability * _BINS), _BINS - 1)


class DraftGate:
    """Decides the draft length round by round; one per server, as its calibration is worth sharing between requests.

    Args:
        costs: of verification and drafting; `costs.longest` is never exceeded.
        most: the user's number of draft tokens.
    """

    def __init__(self, costs: Costs, most: int) -> None:
        if not 1 <= most <= costs.longest:
            raise ValueError(f"most is {most}, expected 1 to {costs.longest}")
        self._costs, self._most = costs, most
        self._calibration = Calibration()
        # What an emitted token costs; at first what it costs without speculation, which lets drafting start.
        self._per_token = costs.verify[1]
        self._next_chance = [0.5] * most

    def draft_more(self, chances: Sequence[float]) -> bool:
        """Whether one draft step more is expected to pay, given the chances of the tokens drafted so far."""
        done = len(chances)
        if done >= self._most:
            return False
        expected = _product(chances) * self._next_chance[done]
        marginal = self._costs.draft + self._costs.verify[done + 2] - self._costs.verify[done + 1]
        return expected * self._per_token > marginal

    def chance(self, probability: float) -> float:
        """Calibrated acceptance of a draft token; what `draft_more` and `verify` are given."""
        return self._calibration.chance(probability)

    def verify(self, chances: Sequence[float]) -> int:
        """How many of the drafted tokens to verify: those whose own verification is expected to pay."""
        product, keep = 1.0, 0
        for index, chance in enumerate(chances):
            product *= chance
            marginal = self._costs.verify[index + 2] - self._costs.verify[index + 1]
            if product * self._per_token <= marginal:
                break
            keep = index + 1
        return keep

    def observe(self, probabilities: Sequence[float], verified: int, accepted: int) -> None:
        """The outcome of a round.

        Args:
            probabilities: the draft's, one per draft step made.
            verified: how many of them were verified.
            accepted: how many of those were accepted; the round then gave one token more, the target's own.
        """
        for index in range(min(accepted + 1, verified)):
            self._calibration.observe(probabilities[index], index < accepted)
        for index, probability in enumerate(probabilities):
            self._next_chance[index] += 0.1 * (self.chance(probability) - self._next_chance[index])
        cost = self._costs.draft * len(probabilities) + self._costs.verify[verified + 1]
        self._per_token += _RECENT * (cost - (accepted + 1) * self._per_token)
        # A position that is never drafted would keep its last estimate for ever: let it drift back to curiosity.
        for index in range(len(probabilities), self._most):
            self._next_chance[index] += 0.002 * (0.9 - self._next_chance[index])


def _product(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return product
