# SPDX-License-Identifier: Apache-2.0
"""Which kinds of batches the fused path has been compared in with vLLM's layers, and what is on record about it.

A kind is what decides which kernels run and what they have to find, so each is compared before the first batch of it
takes the path. vLLM warms up every graph it captures, hence that is at load, except for what no graph holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vllm_ling.decode.check import BOUND, Inconclusive, NotChecked
from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.status import STATUS, choose, fault, proof

# How many comparisons may come to nothing. Those that a batch leaves no room for do not count: while vLLM measures the
# memory of its graphs, one warm-up after the other runs on a cache of a few blocks.
CHECKS = 4


@dataclass(frozen=True)
class Kind:
    """A kind of batch.

    Attributes:
        tokens: of the batch, rounded up to a power of two: no kernel is compiled for other counts.
        longest: tokens of a sequence that there is room for; picks the KDA kernel.
        several: some sequence holds more than one, so tokens see each other.
        attended: MLA layers whose attention is ours; in the others it is vLLM's.
    """

    tokens: int
    longest: int = 1
    several: bool = False
    attended: int = 0

    def __str__(self) -> str:
        said = f"{self.tokens} token{'s' * (self.tokens > 1)}{', several of a sequence' * self.several}"
        return f"{said}, our attention in {self.attended} layers" if self.attended else said


def kind_of(tokens: int, batches: Mapping[str, KdaBatch], attended: int = 0) -> Kind:
    """The kind of a batch of `tokens` tokens; without sequences (a draft's) its tokens and attention decide."""
    batch = next(iter(batches.values()), None)
    rounded = 1 << (tokens - 1).bit_length()
    if batch is None:
        return Kind(rounded, attended=attended)
    # The starts lie on the GPU; a batch with fewer sequences than tokens needs no look at them.
    several = batch.starts is not None and tokens > batch.slots.shape[0]
    return Kind(rounded, batch.longest, several, attended)


class Comparisons:
    """The comparisons of one model's path; `what` names the model in the record."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done: list[Kind] = []
        self._waiting: dict[Kind, str] = {}
        self._left = CHECKS
        self._furthest = ("", 0.0)

    def cover(self, kind: Kind) -> bool:
        """Whether batches of this kind are known to agree."""
        return kind in self._done or replace(kind, several=True) in self._done

    def wait(self, kind: Kind, reason: str) -> None:
        """Notes why this kind could not be compared yet."""
        self._waiting[kind] = reason
        self._say()

    def make(self, kind: Kind, compare: Callable[[], dict[str, float]]) -> str:
        """Compares a kind; returns why the path has to be given up, or "". `compare` is `check.disagreements`."""
        try:
            found = compare()
        except Inconclusive as reason:
            self._left -= 1
            if not self._left:
                return f"{CHECKS} comparisons with vLLM's layers showed nothing: {reason}"
            self.wait(kind, str(reason))
            return ""
        except NotChecked as reason:  # a later batch may do
            self.wait(kind, str(reason))
            return ""
        except Exception as error:
            return f"the comparison with vLLM's layers failed: {type(error).__name__}: {error}"
        wrong = {name: distance for name, distance in found.items() if not distance <= BOUND}
        if wrong:
            worst = ", ".join(f"{name} {distance:.2f}" for name, distance in list(wrong.items())[:3])
            fault(
                f"{self._what}_decode",
                f"{len(wrong)} of {len(found)} parts disagree with vLLM's layers ({kind}): {worst}",
            )
            return "it disagrees with vLLM's layers on the loaded weights"
        self._agreed(kind, found)
        return ""

    def _agreed(self, kind: Kind, found: Mapping[str, float]) -> None:
        self._done.append(kind)
        self._waiting = {other: why for other, why in self._waiting.items() if not self.cover(other)}
        self._furthest = max(self._furthest, *found.items(), key=lambda part: part[1])  # none is NaN here
        name, distance = self._furthest
        proof(
            f"{self._what}_decode",
            f"{len(found)} parts agree with vLLM's layers, stream, states and attention's inputs, in batches of "
            f"{'; '.join(map(str, self._done))}; the furthest is {name}, {distance:.4f}",
        )
        self._say()

    def _say(self) -> None:
        what = f"{self._what} decode check"
        if self._waiting:
            kind, reason = next(iter(self._waiting.items()))
            choose(what, "unknown", f"{kind}: {reason}")
        elif what in STATUS.choices:
            choose(what, "ok", "compared at a later batch")
