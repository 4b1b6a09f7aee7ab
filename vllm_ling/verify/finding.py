# SPDX-License-Identifier: Apache-2.0
"""What a part of the verification found, and what all of them come to."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_ling.doctor.finding import EXIT_CODES, Outcome

_WORST_FIRST: tuple[Outcome, ...] = ("fail", "warn", "unknown", "ok")
_SHOWN = 6  # of the problems; a damaged file has thousands


class Finding(BaseModel):
    """One part's answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    part: str
    outcome: Outcome = Field(description="unknown: the evidence is missing; never to be read as ok.")
    evidence: str
    fix: str = Field(default="", description="What mends it, or gets the missing evidence.")
    figures: dict[str, Any] = Field(default_factory=dict)


def judged(
    part: str, problems: Sequence[tuple[Outcome, str]], said: Sequence[str], figures: dict[str, Any], fix: str
) -> Finding:
    """A finding whose outcome is the worst of `problems` (ok without any).

    Args:
        problems: what is wrong, each with its outcome.
        said: what was seen otherwise.
        fix: used only where something is wrong.
    """
    outcome = worst([kind for kind, _ in problems])
    words = [text for kind in _WORST_FIRST for found, text in problems if found == kind]
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"and {len(words) - _SHOWN} more"]
    return Finding(
        part=part,
        outcome=outcome,
        evidence="; ".join([*words, *filter(None, said)]),
        fix=fix if problems else "",
        figures=figures,
    )


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst outcome: fail before warn before unknown before ok, as for doctor's exit code."""
    return next((outcome for outcome in _WORST_FIRST if outcome in outcomes), "ok")


def exit_code(findings: Sequence[Finding]) -> int:
    """0 ok, 1 warn, 2 fail, 3 unknown."""
    return EXIT_CODES[worst([finding.outcome for finding in findings])]
