# SPDX-License-Identifier: Apache-2.0
"""Arguments in a log: enum members and flags become names, strings stay what they are, odd lines cost no time."""

import enum
import time
from typing import Any

import pytest

from vllm_ling.doctor.facts.literals import literal


class Parts(enum.Flag):
    A = 1
    B = 2


class Mode(enum.Enum):
    FULL = (2, 0)
    ODD = "<it's>"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (Mode.FULL, "FULL"),
        (Mode.ODD, "ODD"),
        (Parts.A, "A"),
        (Parts.A | Parts.B, "A|B"),
        (Parts(0), ""),
        ("<Mode.FULL: (2, 0)>", "<Mode.FULL: (2, 0)>"),
        ("it's <Parts.A: 1>", "it's <Parts.A: 1>"),
        (None, None),
    ],
)
@pytest.mark.parametrize("beside", [None, Mode.FULL], ids=["alone", "beside_a_member"])
def test_members_become_names_and_strings_stay(value: Any, read: Any, beside: Any) -> None:
    text = repr({"first": beside, "value": [value], "last": '"<'})
    expected = {"first": "FULL" if beside else None, "value": [read], "last": '"<'}
    assert literal(text) == expected


@pytest.mark.parametrize(
    "text", ["{'a': <Mode.FULL: 1}", "{'a': <Mode.: 1>}", "{'a': Mode.FULL}", "f(<A.B: 1>)"]
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        literal(text)


@pytest.mark.parametrize(
    "piece", ["<a.b: '", "<a.b: \\'", "'\\'", "<a", "<a.b: x", "<a.b: \"'", "<a.b: '\\'\\"]
)
def test_odd_lines_take_no_time(piece: str) -> None:
    started = time.process_time()
    with pytest.raises((SyntaxError, ValueError)):
        literal("{" + piece * (65_000 // len(piece)))
    assert time.process_time() - started < 1
