# SPDX-License-Identifier: Apache-2.0
"""The demo's stages build on each other, and every bar can fail."""

import json
from typing import Any

import pytest

from vllm_ling.eval.demo.run import server_flags
from vllm_ling.eval.demo.stages import STAGES, StageRun, broken_bars, what_caught
from vllm_ling.eval.demo.table import StageResult
from vllm_ling.options import parse_options

BY_NAME = {stage.name: stage for stage in STAGES}


def run(name: str, *, errors: tuple[str, ...] = (), **changes: Any) -> StageRun:
    """A run that clears every bar, but for the changes."""
    stage = BY_NAME[name]
    accept = {"mtp": 2.5, "trap": 1.0, "trap_scale": 2.5}.get(name)
    good: dict[str, Any] = {
        "name": name,
        "accuracy": 0.93,
        "items": 300,
        "accept_length": accept,
        "tok_per_s": 30.0,
        "tpot_ms": 33.0,
        "ttft_ms": 50.0,
        "median_output_tokens": 40,
        "flagged": stage.trap,
    }
    result = StageResult(**(good | changes))
    return StageRun(stage, result, {"draft_head": "broken"} if result.flagged else {}, errors)


def test_names_and_order_are_those_others_rely_on() -> None:
    assert [stage.name for stage in STAGES] == ["baseline", "head", "moe", "mtp", "trap", "trap_scale"]


def test_every_stage_changes_one_thing() -> None:
    def setting(name: str) -> dict[str, Any]:
        return {**BY_NAME[name].options, "speculates": BY_NAME[name].speculates}

    def changed(before: str, after: str) -> set[str]:
        old, new = setting(before), setting(after)
        return {key for key in old | new if old.get(key) != new.get(key)}

    assert changed("baseline", "head") == {"lm_head"}
    assert changed("head", "moe") == {"moe"}
    assert changed("moe", "mtp") == {"speculates"}
    assert changed("mtp", "trap") == changed("mtp", "trap_scale") == {"on_fault", "inject_fault"}
    assert changed("trap", "trap_scale") == {"inject_fault"}


@pytest.mark.parametrize("name", BY_NAME)
def test_flags_carry_valid_options(name: str) -> None:
    flags = server_flags(BY_NAME[name])
    additional = json.loads(flags[flags.index("--additional-config") + 1])
    assert parse_options(additional).model_dump(exclude_unset=True) == BY_NAME[name].options
    assert ("--speculative-config" in flags) == (name in ("mtp", "trap", "trap_scale"))


def test_a_good_demo_breaks_no_bar() -> None:
    assert broken_bars([run(name) for name in BY_NAME]) == []


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("baseline", {"accuracy": 0.84}, "baseline: accuracy 84.0% < 85%"),
        ("baseline", {"flagged": True}, "baseline: flagged without cause"),
        ("moe", {"accuracy": 0.91}, "moe: accuracy 91.0% against 93.0% of the baseline"),
        ("mtp", {"accuracy": 0.9, "items": 50}, "mtp: accuracy 90.0% against"),
        ("mtp", {"accept_length": 2.2}, "mtp: accept length 2.20 < 2.3"),
        ("mtp", {"accept_length": None}, "mtp: accept length 0.00 < 2.3"),
        ("trap", {"accept_length": 1.2}, "trap: accept length 1.20 > 1.05"),
        ("trap", {"flagged": False}, "trap: the fault was not flagged"),
        ("trap_scale", {"flagged": False}, "trap_scale: the fault was not flagged"),
        ("head", {"errors": ("HTTP 500",)}, "head: 1 requests failed, first: HTTP 500"),
    ],
)
def test_each_bar_can_fail(name: str, changes: dict[str, Any], said: str) -> None:
    runs = [run(other, **(changes if other == name else {})) for other in BY_NAME]
    (broken,) = broken_bars(runs)
    assert broken.startswith(said)


def test_a_small_sample_may_lose_one_problem() -> None:
    runs = [run("baseline", accuracy=0.96, items=50), run("moe", accuracy=0.94, items=50)]
    assert broken_bars(runs) == []


def test_bars_of_absent_stages_are_left_out() -> None:
    assert broken_bars([run("mtp", accuracy=0.86)]) == []


def test_a_trap_says_what_caught_it() -> None:
    assert "visible as accept length 1.00" in what_caught(run("trap"))
    only = what_caught(run("trap_scale"))
    assert "caught only by the proof at load (draft_head: broken)" in only and "2.50" in only
    assert "not caught" in what_caught(run("trap", flagged=False))
