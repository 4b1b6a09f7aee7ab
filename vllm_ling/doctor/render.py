# SPDX-License-Identifier: Apache-2.0
"""Findings as a table on a terminal, as plain lines in a pipe, as JSON."""

import dataclasses
import inspect
import json
import sys
import textwrap
from typing import Any

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Finding, Outcome

_ORDER: tuple[Outcome, ...] = ("fail", "warn", "unknown", "ok")
_STYLE = {"fail": "bold red", "warn": "yellow", "unknown": "cyan", "ok": "green"}


def as_json(findings: list[Finding], facts: Facts, idle: list[str]) -> str:
    """`{"findings": [...], "facts": {...}, "not_run": [...]}`."""
    answer: dict[str, Any] = {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": facts.as_dict(),
        "not_run": idle,
    }
    return json.dumps(answer, indent=1, ensure_ascii=True)


def print_findings(findings: list[Finding], idle: list[str], everything: bool = False) -> None:
    """The worst first; sound ones are only counted unless `everything` is wanted."""
    shown = [
        f for outcome in _ORDER for f in findings if f.outcome == outcome and (everything or outcome != "ok")
    ]
    if sys.stdout.isatty():
        _table(_together(shown))
    else:
        for finding in _together(shown):
            print(f"{finding.outcome.upper():8}{finding.check}: {finding.evidence}")
            for name in ("cost", "fix"):
                if text := getattr(finding, name):
                    print(f"        {name}: {text}")
    print(summary(findings, idle))


def _together(findings: list[Finding]) -> list[Finding]:
    """Unknown ones with one reason as one finding: a source that is missing must not fill the screen."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        own = finding.check if finding.outcome != "unknown" else ""
        groups.setdefault((own, finding.evidence, finding.fix), []).append(finding)
    return [
        group[0]
        if len(group) == 1
        else dataclasses.replace(group[0], check=", ".join(finding.check for finding in group))
        for group in groups.values()
    ]


def summary(findings: list[Finding], idle: list[str]) -> str:
    """One line: how many of each outcome, and what would let the other checks run."""
    counts = {outcome: sum(f.outcome == outcome for f in findings) for outcome in _ORDER}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    rest = f"; {len(idle)} more checks need {_wanted(idle)}" if idle else ""
    return f"doctor: {said or 'no check ran'}{rest}"


def _wanted(idle: list[str]) -> str:
    """The sources that would let one of the checks that did not run, run."""
    from vllm_ling.doctor.registry import all_checks

    named = {"static": "MODEL and its serve flags", "log": "--log FILE", "live": "--url URL"}
    useful = {source for name in idle for source in all_checks()[name].sources}
    return " or ".join(text for source, text in named.items() if source in useful)


def _table(shown: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "what was seen, what it costs, what mends it", show_lines=True)
    for finding in shown:
        told = Text(finding.evidence)
        if finding.cost:
            told.append(f"\n{finding.cost}", style="italic")
        if finding.fix:
            told.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(finding.outcome.upper(), style=_STYLE[finding.outcome]), Text(finding.check), told)
    if shown:
        Console().print(table)


def print_about(name: str, about: str, sources: frozenset[str]) -> None:
    """A check's explanation."""
    print(f"{name} (evidence from: {', '.join(sorted(sources))})\n")
    print(textwrap.indent(inspect.cleandoc(about), "  "))
