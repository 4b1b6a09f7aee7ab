# SPDX-License-Identifier: Apache-2.0
"""The demo's stages, the bars they must clear, and what caught each trap. Pure logic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ling.eval.demo.table import StageResult

DRAFT_TOKENS = 3
MIN_ACCURACY = 0.85
MAX_ACCURACY_LOSS = 0.01
MIN_ACCEPT_LENGTH = 2.3
# One token per verification and hardly more: the draft head proposes noise.
MAX_TRAP_ACCEPT_LENGTH = 1.05


@dataclass(frozen=True)
class Stage:
    """One server configuration; `options` is the `ling` section, `trap` a fault on purpose."""

    name: str
    adds: str
    options: dict[str, str]
    speculates: bool = False
    trap: bool = False


_ALL_ON = {"lm_head": "fp8", "moe": "ling"}
STAGES = (
    Stage("baseline", "BF16 head, reference experts", {"lm_head": "bf16", "moe": "reference"}),
    Stage("head", "+ FP8 head", {"lm_head": "fp8", "moe": "reference"}),
    Stage("moe", "+ MXFP4 experts", _ALL_ON),
    Stage("mtp", f"+ MTP({DRAFT_TOKENS}), shared head", _ALL_ON, speculates=True),
    Stage(
        "trap",
        "draft head reads FP8 bytes as BF16",
        {**_ALL_ON, "on_fault": "warn", "inject_fault": "head_bytes"},
        speculates=True,
        trap=True,
    ),
    Stage(
        "trap_scale",
        "draft head drops the FP8 scale",
        {**_ALL_ON, "on_fault": "warn", "inject_fault": "head_scale"},
        speculates=True,
        trap=True,
    ),
)


@dataclass(frozen=True)
class StageRun:
    """A measured stage with what the schema has no place for: its FAULT lines and transport errors."""

    stage: Stage
    result: StageResult
    faults: dict[str, str] = field(default_factory=dict)
    errors: Sequence[str] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def broken_bars(runs: Sequence[StageRun]) -> list[str]:
    """What a set of runs fails to show; empty if all is well. Bars about stages that did not run are left out."""
    baseline = next((run.result for run in runs if run.stage.name == "baseline"), None)
    return [f"{run.stage.name}: {problem}" for run in runs for problem in _problems(run, baseline)]


def _problems(run: StageRun, baseline: StageResult | None) -> list[str]:
    row, wrong = run.result, []
    accept = row.accept_length or 0.0
    if run.errors:
        wrong.append(f"{len(run.errors)} requests failed, first: {run.errors[0]}")
    if run.stage.trap:
        if not row.flagged:
            wrong.append("the fault was not flagged at load")
        if run.stage.name == "trap" and accept > MAX_TRAP_ACCEPT_LENGTH:
            wrong.append(f"accept length {accept:.2f} > {MAX_TRAP_ACCEPT_LENGTH}")
        return wrong
    if row.flagged:
        wrong.append(f"flagged without cause: {run.faults}")
    if row.accuracy < MIN_ACCURACY:
        wrong.append(f"accuracy {row.accuracy:.1%} < {MIN_ACCURACY:.0%}")
    # A sample of fewer than 100 problems cannot resolve one point; there, one problem may be lost.
    if (
        baseline
        and row.items
        and row.accuracy < baseline.accuracy - max(MAX_ACCURACY_LOSS, 1 / row.items) - 1e-9
    ):
        wrong.append(f"accuracy {row.accuracy:.1%} against {baseline.accuracy:.1%} of the baseline")
    if run.stage.speculates and accept < MIN_ACCEPT_LENGTH:
        wrong.append(f"accept length {accept:.2f} < {MIN_ACCEPT_LENGTH}")
    return wrong


def what_caught(run: StageRun) -> str:
    """One sentence about a trap: which check saw it, and whether the accept length would have."""
    accept = run.result.accept_length or 0.0
    seen = f"accept length {accept:.2f}"
    if not run.faults:
        return f"{run.stage.name}: not caught by any proof at load; {seen}"
    proofs = "; ".join(f"{code}: {message}" for code, message in run.faults.items())
    if accept < MIN_ACCEPT_LENGTH:
        return f"{run.stage.name}: caught by the proof at load ({proofs}), and visible as {seen}."
    return (
        f"{run.stage.name}: caught only by the proof at load ({proofs}); {seen} and the answers look healthy."
    )
