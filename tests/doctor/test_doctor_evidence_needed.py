# SPDX-License-Identifier: Apache-2.0
"""Missing evidence, taken away fact by fact: it never accuses, and without any nothing is ok."""

from pathlib import Path

import pytest

from tests.doctor.clean import CLEAN
from tests.doctor.faults.every import FAULTS
from vllm_ling.doctor.facts.store import Facts, Source
from vllm_ling.doctor.registry import run_checks

# Findings about speed: each says what it costs.
COSTLY = {
    "accept_length",
    "caches",
    "draft_head",
    "draft_positions",
    "graph_sizes",
    "graphs_on",
    "head_dtype",
    "head_format",
    "level_2_sleep",
    "preemptions",
    "router_dtype",
    "speculation_pays",
}


@pytest.mark.fault
@pytest.mark.parametrize("source", ["static", "log", "live"])
def test_without_facts_every_check_is_unknown(source: Source) -> None:
    facts = Facts()
    facts.sources.add(source)
    findings, _ = run_checks(facts)
    assert len(findings) > 20
    assert {f.check for f in findings if f.outcome != "unknown"} == {"sources_readable"}


@pytest.mark.clean
@pytest.mark.parametrize("name", CLEAN)
def test_a_missing_fact_never_accuses(name: str, tmp_path: Path) -> None:
    facts = CLEAN[name].facts(tmp_path)
    run_checks(facts)  # makes the comparison with the headers, once
    complete = dict(facts._known)
    for key in complete:
        facts._known = {k: v for k, v in complete.items() if k != key}
        assert {f.check for f in run_checks(facts)[0] if f.outcome in ("warn", "fail")} == set(), key


@pytest.mark.fault
def test_findings_about_speed_say_what_they_cost(tmp_path: Path) -> None:
    silent = []
    for number, fault in enumerate(FAULTS):
        if fault.check in COSTLY and fault.outcome in ("warn", "fail"):
            folder = tmp_path / str(number)
            folder.mkdir()
            found = {f.check: f for f in run_checks(fault.bad.facts(folder))[0]}[fault.check]
            if not found.cost:
                silent.append(fault.name)
    assert silent == []
