# SPDX-License-Identifier: Apache-2.0
"""Seeded generator of arithmetic word problems in GSM8K's format, with a part that training never meets.

Which side a problem belongs to depends on the numbers in its question alone, so the two sides share no
question text and no combination of numbers, whatever the wording.
"""

import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_ling.tiny.templates import NAMES, OBJECTS, TEMPLATES, Range, Template

HELDOUT_PATH = Path(__file__).parent / "data" / "heldout.jsonl"
HELDOUT_ITEMS = 300
HELDOUT_SEED = 20_260_300
LARGEST = 999

_EQUATION = re.compile(r"\[(\w)=(\w)([-+*/])(\w)\]")
_FORMULA = re.compile(r"(\w)([-+*/])(\w)")


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer ending in `#### N`, and N."""

    template: str
    question: str
    answer: str
    result: int


def is_heldout(question: str) -> bool:
    """Whether the numbers of a question, in order, belong to the held-out sixteenth of all combinations."""
    return zlib.crc32(" ".join(re.findall(r"\d+", question)).encode()) % 16 == 0


def problems(seed: int, heldout: bool) -> Iterator[Problem]:
    """An endless reproducible stream from one side of the split."""
    rng = random.Random(seed)
    while True:
        problem = draw(rng, rng.choice(TEMPLATES))
        if is_heldout(problem.question) == heldout:
            yield problem


def heldout_problems() -> list[Problem]:
    """The shipped evaluation set: `HELDOUT_ITEMS` distinct questions."""
    found: dict[str, Problem] = {}
    for problem in problems(HELDOUT_SEED, heldout=True):
        found.setdefault(problem.question, problem)
        if len(found) == HELDOUT_ITEMS:
            return list(found.values())
    raise AssertionError("the stream is endless")


def write_heldout(path: Path = HELDOUT_PATH) -> None:
    """Writes the evaluation set as JSON lines with the keys question and answer."""
    rows = [json.dumps({"question": p.question, "answer": p.answer}) for p in heldout_problems()]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def final_number(text: str) -> int | None:
    """The N of the first `#### N` line, or None."""
    match = re.search(r"#### *(-?\d+)", text)
    return int(match[1]) if match else None


def draw(rng: random.Random, template: Template) -> Problem:
    """One problem of a template; numbers are redrawn until every result is a whole number in 1..LARGEST."""
    while True:
        numbers = {key: _pick(rng, limits) for key, limits in template.ranges.items()}
        if _solve(template, numbers):
            break
    words = dict(zip("nm", rng.sample(NAMES, 2), strict=True)) | dict(
        zip("op", rng.sample(OBJECTS, 2), strict=True)
    )
    fill = words | {key: str(value) for key, value in numbers.items()}
    question = rng.choice(template.questions).format(**fill)
    lines = []
    for step in template.steps:
        match = _EQUATION.search(step)
        assert match is not None
        result, left, sign, right = match.groups()
        shown = f"{numbers[left]}{sign}{fill.get(right, right)}={numbers[result]}"
        lines.append(step.replace(match[0], shown).format(**fill))
    value = numbers[result]
    question = question[0].upper() + question[1:]
    return Problem(template.name, question, "\n".join([*lines, f"#### {value}"]), value)


def _pick(rng: random.Random, limits: Range) -> int:
    return rng.randint(*limits) if len(limits) == 2 else rng.choice(limits)


def _solve(template: Template, numbers: dict[str, int]) -> bool:
    """Adds derived numbers and results to `numbers`; False if one is no whole number in 1..LARGEST."""
    formulas = [(key, *_FORMULA.fullmatch(text).groups()) for key, text in template.derived.items()]  # type: ignore[union-attr]
    for key, left, sign, right in formulas + [m for s in template.steps for m in _EQUATION.findall(s)]:
        a = numbers[left]
        b = int(right) if right.isdigit() else numbers[right]
        if sign == "/" and (b == 0 or a % b):
            return False
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
        if not 1 <= value <= LARGEST:
            return False
        numbers[key] = value
    return True


if __name__ == "__main__":
    write_heldout()
