# SPDX-License-Identifier: Apache-2.0
"""Where greedy answers leave the reference's, and by how much."""

import math

import pytest
import torch

from vllm_ling.eval.studies.answers import Divergence, TinyAnswers, divergences

LOGITS = torch.tensor([[9.0, 8.5, 0.0], [1.0, 7.0, 6.9], [5.0, 0.0, 1.0]])


@pytest.fixture(scope="module")
def tiny() -> TinyAnswers:
    return TinyAnswers(4)


@pytest.mark.parametrize(
    ("answer", "position", "gap"),
    [([1, 1, 0], 0, 0.5), ([0, 2, 2], 1, 0.1), ([0, 1], 2, math.inf), ([0, 1, 0, 0], 3, math.inf)],
)
def test_the_first_difference_is_judged(answer: list[int], position: int, gap: float) -> None:
    (found,) = divergences([answer], [[0, 1, 0]], [LOGITS])
    assert found == Divergence(0, position, pytest.approx(gap, abs=1e-5))


def test_equal_answers_do_not_diverge() -> None:
    assert divergences([[0, 1, 0]], [[0, 1, 0]], [LOGITS]) == []


def test_the_reference_agrees_with_itself_and_its_margins_are_wide(tiny: TinyAnswers) -> None:
    assert tiny.divergences(tiny.tokens) == [] and tiny.exact_match(tiny.tokens) == 1
    best = torch.cat(tiny.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 5
    assert tiny.accept_length(3) > 3


def test_wrong_answers_and_logits_are_told_apart(tiny: TinyAnswers) -> None:
    other = [[*answer[:5], answer[5] + 1, *answer[6:]] for answer in tiny.tokens]
    assert [(one.position, one.gap > 1) for one in tiny.divergences(other)] == [(5, True)] * 4
    assert tiny.exact_match([[0]] * 4) == 0
    tops = [[[(int(row.argmax()), float(row.max()))] for row in logits] for logits in tiny.logits]
    assert tiny.distance(tops, tiny.tokens) == 0
    shifted = [[[(token, 1.1 * value) for token, value in row] for row in rows] for rows in tops]
    assert tiny.distance(shifted, tiny.tokens) == pytest.approx(0.1, abs=1e-3)
    # After a divergence the texts are others and nothing is compared.
    late = [[row if n < 6 else [(0, 1e9)] for n, row in enumerate(rows)] for rows in tops]
    assert tiny.distance(late, other) == 0
