# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired runs: McNemar's exact test, bootstrap intervals, a verdict against a stated margin."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
_RESAMPLES = 4000


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value of McNemar's test.

    Args:
        only_a: items that only the first run got right.
        only_b: items that only the second run got right.
    """
    if min(only_a, only_b) < 0:
        raise ValueError(f"discordant counts {only_a} and {only_b} must not be negative")
    n, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
    return min(1.0, 2 * tail)


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval."""

    estimate: float
    low: float
    high: float


def bootstrap(
    pairs: Sequence[tuple[float, float]],
    statistic: Callable[[Sequence[tuple[float, float]]], float],
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile interval of a statistic of pairs, by resampling whole pairs.

    Raises:
        ValueError: no pairs, or a level outside (0, 1).
    """
    if not pairs or not 0 < level < 1:
        raise ValueError(f"bootstrap needs pairs and a level between 0 and 1, got {len(pairs)} and {level}")
    chooser = random.Random(seed)
    found = sorted(statistic(chooser.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    cut = (1 - level) / 2
    low, high = found[int(cut * _RESAMPLES)], found[min(int((1 - cut) * _RESAMPLES), _RESAMPLES - 1)]
    return Interval(statistic(pairs), low, high)


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean of the second over mean of the first; infinite where the first are all zero."""
    first, second = (sum(values) for values in zip(*pairs, strict=True))
    return second / first if first else math.inf


def share_difference(only_a: int, only_b: int, items: int, level: float = 0.95) -> Interval:
    """Share of the second run minus that of the first, over paired items (Bonett and Price's adjusted interval).

    A bootstrap of items that all agree gives an interval of no width, so that five items would prove anything; here the
    interval has the width that so few items leave.
    """
    if min(only_a, only_b) < 0 or only_a + only_b > items or not items or not 0 < level < 1:
        raise ValueError(f"{only_a} and {only_b} of {items} items, level {level}")
    a, b = (only_a + 1) / (items + 2), (only_b + 1) / (items + 2)
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt((a + b - (b - a) ** 2) / (items + 2))
    return Interval((only_b - only_a) / items, max(-1.0, b - a - half), min(1.0, b - a + half))


def verdict(difference: Interval, margin: float) -> Verdict:
    """Whether the second run is at most `margin` worse: PASS or FAIL if the whole interval says so."""
    if margin <= 0:
        raise ValueError(f"the margin is {margin}, expected a positive share such as 0.01")
    if difference.low > -margin:
        return "PASS"
    return "FAIL" if difference.high < -margin else "INCONCLUSIVE"


@dataclass(frozen=True)
class Comparison:
    """Accuracy of two runs over the same items; `sentence` says what may be claimed."""

    items: int
    accuracy: tuple[float, float]
    only_a: int
    only_b: int
    p: float
    difference: Interval
    verdict: Verdict
    sentence: str


def compare_accuracy(
    right_a: Sequence[bool], right_b: Sequence[bool], margin: float, level: float = 0.95
) -> Comparison:
    """Compares two runs, item by item.

    Args:
        right_a, right_b: whether each item was answered rightly, in the same order.
        margin: largest loss of accuracy that still passes, as a share.
        level: of the interval; 1 - level is where a difference is called one.

    Raises:
        ValueError: different or no items.
    """
    if len(right_a) != len(right_b) or not right_a:
        raise ValueError(f"{len(right_a)} and {len(right_b)} items cannot be paired")
    only_a = sum(a and not b for a, b in zip(right_a, right_b, strict=True))
    only_b = sum(b and not a for a, b in zip(right_a, right_b, strict=True))
    difference = share_difference(only_a, only_b, len(right_a), level)
    p = mcnemar(only_a, only_b)
    found = "a difference" if p < 1 - level else "no difference"
    return Comparison(
        items=len(right_a),
        accuracy=(sum(right_a) / len(right_a), sum(right_b) / len(right_b)),
        only_a=only_a,
        only_b=only_b,
        p=p,
        difference=difference,
        verdict=verdict(difference, margin),
        sentence=f"{found} found: {only_a} items only the first, {only_b} only the second (McNemar exact p = {p:.3g})",
    )
