# SPDX-License-Identifier: Apache-2.0
"""Judges the states of two engines against the fp32 reference, and against each other. Pure logic.

The bars. Stock vLLM rounds the input of every FP8 projection to E4M3, which costs about 2.6% in each product, and both
engines round to BF16; all of that adds up over the layers. Our decode path keeps BF16 activations, so it may not be
further from fp32 than stock is: `NO_WORSE` allows for the luck of a few dozen tokens, `FLOOR` for BF16 where stock
happens to be exact. The FP8 head is ours alone and costs 2.6% of a logit (`head_probe`). The mean over tokens is judged
and the median: one token whose router flips can dominate the mean, a fault in a kernel moves both.

Sequences that start with a single token never pass through stock's prefill. Where our kernels keep BF16 activations
their distance is BF16's alone: `OWN` times the root of the layers, twice what the CPU backend shows, which computes
so too. Simulated in the reference, BF16 costs a tenth more on layers as wide as flash's than on the small model's.

What a bar is worth is measured too: `stale` is how far the reference moves if the same continuation follows another
prompt, that is, if a state belonged to another request. A bar that it does not exceed by half proves nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

NO_WORSE, FLOOR = 1.25, 0.005
HEAD = 0.03
OWN = 0.006
# Stock further than this from fp32 does not compute the same function: nothing could be concluded.
STOCK_SANE = 0.15
# Times the root of the layers, in place of stock where it cannot run: its activation rounding, simulated in the
# reference on layers as wide as flash's, after 6, 12 and 42 layers.
ASSUMED = 0.015
BLIND = 1.5
# Agreement on the best logit besides the known one may fall this far below stock's; the FP8 head alone costs about 7%.
TOP1_SLACK = 0.12

States = Mapping[int, Mapping[str, Tensor]]
"""Per lane: "positions" [n], values [n, width] per tap, and "logits positions" for the logits."""


@dataclass(frozen=True)
class Away:
    """Relative RMS distance from the reference: over all tokens, and the median token's."""

    rms: float
    median: float


@dataclass(frozen=True)
class Comparison:
    """One tap of one workload.

    Attributes:
        apart: ours against stock, where both have the token.
        depth: layers that the tap lies behind.
        own: whether the bar is BF16's, in place of the one that stock's distance gives.
    """

    workload: str
    tap: str
    tokens: int
    ours: Away
    stock: Away | None
    apart: float | None
    stale: float | None
    depth: int = 1
    own: bool = False

    @property
    def limits(self) -> Away:
        """The most that ours may be away."""
        head = HEAD if self.tap == "logits" else 0.0
        if self.own:
            return Away(*[(OWN**2 * self.depth + head**2) ** 0.5] * 2)
        stock = self.stock or Away(*[ASSUMED * self.depth**0.5] * 2)
        rms, median = (
            ((NO_WORSE * value) ** 2 + head**2) ** 0.5 + FLOOR for value in (stock.rms, stock.median)
        )
        return Away(rms, median)

    def wrong(self) -> list[str]:
        """What is wrong with it; empty if it shows what it must."""
        limits, where, found = self.limits, f"{self.workload}, {self.tap}", []
        if self.stock is not None and not self.stock.rms <= STOCK_SANE:
            found.append(f"{where}: stock is {self.stock.rms:.3f} away from fp32, no measure of anything")
        # Not <=: NaN is wrong.
        if not self.ours.rms <= limits.rms:
            found.append(f"{where}: {self.ours.rms:.3f} away from fp32, the bar is {limits.rms:.3f}")
        if not self.ours.median <= limits.median:
            found.append(
                f"{where}: the median token is {self.ours.median:.3f} away from fp32, "
                f"the bar is {limits.median:.3f}"
            )
        if self.stale is not None and not self.stale > BLIND * limits.rms:
            found.append(f"{where}: a stale state would move it by {self.stale:.3f} only; the bar is blind")
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON data, limits and verdict included."""
        return asdict(self) | {"limits": asdict(self.limits), "wrong": self.wrong()}


def depth_of(tap: str, layers: int) -> int:
    """How many layers a tap lies behind, in a model of `layers`."""
    return int(tap) + 1 if tap.isdigit() else layers


def away(pairs: Sequence[tuple[Tensor, Tensor]]) -> Away:
    """Distance of (ours, exact) pairs of [tokens, width]."""
    error = torch.cat([(ours.float() - exact).square().mean(-1) for ours, exact in pairs])
    size = torch.cat([exact.square().mean(-1) for _, exact in pairs])
    return Away(float((error.mean() / size.mean()).sqrt()), float((error / size).sqrt().median()))


def rows_of(states: States, tap: str, span: Mapping[int, range]) -> dict[tuple[int, int], Tensor]:
    """Values of a tap by (lane, position), inside each lane's span."""
    found = {}
    for lane, kept in states.items():
        positions = kept["logits positions" if tap == "logits" else "positions"].tolist()
        for index, position in enumerate(positions):
            if position in span[lane]:
                found[lane, position] = kept[tap][index]
    return found


def compare(
    workload: str,
    tap: str,
    span: Mapping[int, range],
    ours: States,
    stock: States | None,
    exact: States,
    stale: States | None,
    depth: int = 1,
    own: bool = False,
) -> Comparison | None:
    """One comparison over the tokens of `span`; None if our side has none of them."""
    mine, right = rows_of(ours, tap, span), rows_of(exact, tap, span)
    if not mine:
        return None
    theirs = rows_of(stock, tap, span) if stock is not None else {}
    both = [key for key in theirs if key in mine]
    other = rows_of(stale, tap, span) if stale is not None else {}
    return Comparison(
        workload,
        tap,
        len(mine),
        _distance(mine, right, list(mine)),
        _distance(theirs, right, list(theirs)) if theirs else None,
        _distance(mine, {key: theirs[key].float() for key in both}, both).rms if both else None,
        _distance(other, right, list(other)).rms if other else None,
        depth,
        own,
    )


def _distance(
    some: Mapping[tuple[int, int], Tensor],
    exact: Mapping[tuple[int, int], Tensor],
    keys: Sequence[tuple[int, int]],
) -> Away:
    return away([(torch.stack([some[key] for key in keys]), torch.stack([exact[key] for key in keys]))])


def missing(workload: str, span: Mapping[int, range], states: States) -> list[str]:
    """Tokens that were never seen; an engine that does not pass through the taps cannot pass the bars."""
    wrong = []
    for lane in states:
        # The last token is emitted and not fed.
        lost = set(span[lane][:-1]) - set(states[lane]["positions"].tolist())
        if lost:
            wrong.append(
                f"{workload}: {len(lost)} tokens of lane {lane} were never seen, the first at {min(lost)}"
            )
    return wrong


def agreement(
    states: States, exact: States, span: Mapping[int, range], known: Mapping[int, list[int]]
) -> float:
    """Share of tokens whose best logit, the known next token `known[lane][position + 1]` aside, is the reference's."""
    mine, right = rows_of(states, "logits", span), rows_of(exact, "logits", span)
    same = total = 0
    for (lane, position), row in mine.items():
        if position + 1 >= len(known[lane]):
            continue
        best = []
        for logits in (row, right[lane, position]):
            others = logits.float().clone()
            others[known[lane][position + 1]] = -torch.inf
            best.append(int(others.argmax()))
        same, total = same + (best[0] == best[1]), total + 1
    return same / total if total else float("nan")


def identical(one: States, other: States) -> float:
    """Share of values that are equal to the bit; 0 where the tokens differ."""
    same = total = 0
    for lane, kept in one.items():
        for name, value in kept.items():
            theirs = other[lane].get(name)
            if theirs is None or theirs.shape != value.shape:
                return 0.0
            same, total = same + int((value == theirs).sum()), total + value.numel()
    return same / total if total else 0.0


def repeats(name: str, reused: float, again: float) -> list[str]:
    """Judges a workload in slots that were used: it must repeat as exactly as the same workload repeats by itself."""
    if again == 1.0 and reused != 1.0:
        return [f"{name}: {reused:.2%} of the values repeat in slots that were used, all of them otherwise"]
    if reused < again - 0.1:
        return [f"{name}: {reused:.2%} of the values repeat in slots that were used, {again:.2%} otherwise"]
    return []
