# SPDX-License-Identifier: Apache-2.0
"""Statistics against scipy, the study's own counts, and the words that may be used."""

import math
import random

import pytest
from scipy.stats import binomtest

from vllm_ling.eval.report.statistics import (
    Interval,
    bootstrap,
    compare_accuracy,
    mcnemar,
    ratio_of_means,
    share_difference,
    verdict,
)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (5, 5), (14, 13), (3, 17), (0, 40), (200, 150)])
def test_mcnemar_is_the_exact_binomial_test(a: int, b: int) -> None:
    expected = binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
    assert mcnemar(a, b) == pytest.approx(expected, rel=1e-9)


def runs(both: int, only_a: int, only_b: int, neither: int) -> tuple[list[bool], list[bool]]:
    a = [True] * both + [True] * only_a + [False] * only_b + [False] * neither
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


def test_the_studys_counts_are_no_difference_and_never_equal() -> None:
    """1,278 and 1,277 of 1,319: 96.89% and 96.82%, 14 against 13 discordant."""
    found = compare_accuracy(*runs(1264, 14, 13, 28), margin=0.01)
    assert found.items == 1319 and found.p == 1.0
    assert [round(100 * share, 2) for share in found.accuracy] == [96.89, 96.82]
    assert found.sentence.startswith("no difference found") and "equal" not in found.sentence
    assert found.verdict == "PASS"


@pytest.mark.parametrize(
    ("counts", "margin", "expected"),
    [
        ((900, 5, 5, 90), 0.02, "PASS"),
        ((700, 200, 5, 95), 0.02, "FAIL"),
        ((40, 3, 2, 5), 0.01, "INCONCLUSIVE"),
    ],
)
def test_verdicts(counts: tuple[int, int, int, int], margin: float, expected: str) -> None:
    found = compare_accuracy(*runs(*counts), margin=margin)
    assert found.verdict == expected
    assert found.sentence.startswith("a difference" if found.p < 0.05 else "no difference")


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    chooser, covered = random.Random(1), 0
    for trial in range(40):
        pairs = [(10 + chooser.gauss(0, 1), 20 + chooser.gauss(0, 4)) for _ in range(40)]
        found = bootstrap(pairs, ratio_of_means, level=0.9, seed=trial)
        covered += found.low <= 2.0 <= found.high
    assert 30 <= covered <= 40


def test_a_few_items_that_agree_prove_nothing() -> None:
    for items, expected in ((6, "INCONCLUSIVE"), (100, "INCONCLUSIVE"), (1000, "PASS")):
        found = compare_accuracy([True] * items, [True] * items, margin=0.01)
        assert found.verdict == expected and found.difference.estimate == 0
    assert compare_accuracy([True] * 60 + [False] * 9, [False] * 69, margin=0.01).verdict == "FAIL"


@pytest.mark.parametrize(
    ("a", "b", "items"), [(0.0, 0.02, 60), (0.01, 0.03, 200), (0.05, 0.05, 100), (0.0, 0.0, 50)]
)
def test_interval_of_a_difference_covers_the_truth(a: float, b: float, items: int) -> None:
    """`a`, `b`: chance that only the one, only the other run answers an item rightly."""
    chooser, covered, trials = random.Random(3), 0, 300
    for _ in range(trials):
        drawn = chooser.choices("ab-", [a, b, 1 - a - b], k=items)
        found = share_difference(drawn.count("a"), drawn.count("b"), items)
        covered += found.low <= b - a <= found.high
    assert covered >= 0.93 * trials


def test_bootstrap_keeps_pairs_together() -> None:
    """Latencies that differ a thousandfold between items, each exactly halved: the ratio is certain."""
    pairs = [(float(x), x / 2) for x in (1, 10, 100, 1000)]
    assert bootstrap(pairs, ratio_of_means) == Interval(0.5, 0.5, 0.5)
    assert ratio_of_means([(0.0, 1.0)]) == math.inf


def test_what_makes_no_sense_is_refused() -> None:
    for call in (
        lambda: mcnemar(-1, 2),
        lambda: bootstrap([], ratio_of_means),
        lambda: bootstrap([(1.0, 1.0)], ratio_of_means, level=95),
        lambda: verdict(Interval(0, 0, 0), 0),
        lambda: compare_accuracy([True], [True, False], 0.01),
        lambda: compare_accuracy([], [], 0.01),
        lambda: share_difference(3, 3, 5),
        lambda: share_difference(0, 0, 0),
    ):
        with pytest.raises(ValueError):
            call()
