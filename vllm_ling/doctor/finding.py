# SPDX-License-Identifier: Apache-2.0
"""What a check answers: one of four outcomes with its evidence, what it costs and what mends it."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "warn", "fail", "unknown"]
EXIT_CODES: dict[Outcome, int] = {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}


@dataclass(frozen=True)
class Verdict:
    """A check's answer: what was seen and where; cost and fix are empty where there is nothing to mend."""

    outcome: Outcome
    evidence: str
    fix: str = ""
    cost: str = ""


@dataclass(frozen=True)
class Finding:
    """A verdict with the name of its check; the shape of one entry of `--json`."""

    check: str
    outcome: Outcome
    evidence: str
    cost: str
    fix: str


def ok(evidence: str, cost: str = "") -> Verdict:
    """Nothing to mend."""
    return Verdict("ok", evidence, cost=cost)


def warn(evidence: str, fix: str, cost: str = "") -> Verdict:
    """Works, but slower or riskier than it could."""
    return Verdict("warn", evidence, fix, cost)


def fail(evidence: str, fix: str, cost: str = "") -> Verdict:
    """Wrong output, or an optimization that was asked for and is not there."""
    return Verdict("fail", evidence, fix, cost)


def unknown(evidence: str, fix: str = "") -> Verdict:
    """The evidence is missing; never to be read as ok."""
    return Verdict("unknown", evidence, fix)


def exit_code(findings: list[Finding]) -> int:
    """Code of the worst outcome: fail 2, warn 1, unknown 3, ok 0, in this order."""
    present = {finding.outcome for finding in findings}
    worst: tuple[Outcome, ...] = ("fail", "warn", "unknown")
    return next((EXIT_CODES[outcome] for outcome in worst if outcome in present), 0)
