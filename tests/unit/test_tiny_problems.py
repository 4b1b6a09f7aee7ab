# SPDX-License-Identifier: Apache-2.0
"""The problem generator: deterministic, right, in GSM8K's format, and disjoint from its held-out set."""

import re
from itertools import islice

import pytest

from vllm_ling.tiny.evaluate import load_heldout
from vllm_ling.tiny.problems import (
    HELDOUT_ITEMS,
    LARGEST,
    final_number,
    heldout_problems,
    is_heldout,
    problems,
)
from vllm_ling.tiny.templates import TEMPLATES

_EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


def _numbers(question: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", question))


@pytest.fixture(scope="module")
def training() -> list:
    return list(islice(problems(1, heldout=False), 4000))


def test_same_seed_same_problems(training: list) -> None:
    assert training[:200] == list(islice(problems(1, heldout=False), 200))
    assert training[:200] != list(islice(problems(2, heldout=False), 200))


def test_variety(training: list) -> None:
    assert len(TEMPLATES) >= 12
    assert {p.template for p in training} == {t.name for t in TEMPLATES}
    assert {len(_EQUATION.findall(p.answer)) for p in training} == {2, 3, 4}
    assert len({p.question for p in training}) > 0.99 * len(training)


def test_every_equation_and_answer_is_right(training: list) -> None:
    for problem in training + heldout_problems():
        equations = _EQUATION.findall(problem.answer)
        for left, sign, right, result in equations:
            a, b = int(left), int(right)
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]
            assert value == int(result) and 1 <= value <= LARGEST, problem
        assert problem.answer.endswith(f"\n#### {equations[-1][3]}"), problem
        assert problem.result == final_number(problem.answer) == int(equations[-1][3])
        assert "{" not in problem.question + problem.answer and "[" not in problem.answer


def test_every_number_of_a_solution_is_given_or_derived(training: list) -> None:
    """No step may use a number that the question does not tell: such a problem could not be solved."""
    for problem in training:
        known = set(_numbers(problem.question)) | {"2"}
        for left, _, right, result in _EQUATION.findall(problem.answer):
            assert left in known and right in known, problem
            known.add(result)


def test_heldout_is_disjoint_by_text_and_numbers(training: list) -> None:
    heldout = heldout_problems()
    assert len({p.question for p in heldout}) == HELDOUT_ITEMS
    assert all(is_heldout(p.question) for p in heldout)
    assert not any(is_heldout(p.question) for p in training)
    assert not {p.question for p in heldout} & {p.question for p in training}
    assert not {_numbers(p.question) for p in heldout} & {_numbers(p.question) for p in training}


def test_shipped_file_is_what_the_generator_makes() -> None:
    assert load_heldout() == [{"question": p.question, "answer": p.answer} for p in heldout_problems()]


@pytest.mark.parametrize(
    ("text", "number"), [("a\n#### 12", 12), ("####7\n#### 8", 7), ("12", None), ("#### x", None)]
)
def test_final_number(text: str, number: int | None) -> None:
    assert final_number(text) == number
