# SPDX-License-Identifier: Apache-2.0
"""Every injected fault is found with its cause; without the fault the check is ok, without the evidence unknown."""

from pathlib import Path

import pytest

from tests.doctor.evidence import Evidence
from tests.doctor.faults.common import Fault
from tests.doctor.faults.every import FAULTS
from vllm_ling.doctor.finding import Finding
from vllm_ling.doctor.registry import all_checks, run_checks

pytestmark = pytest.mark.fault


def find(evidence: Evidence, folder: Path, check: str) -> Finding:
    """The finding of one check among all that ran."""
    folder.mkdir()
    findings, _ = run_checks(evidence.facts(folder))
    return next(finding for finding in findings if finding.check == check)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault(fault: Fault, tmp_path: Path) -> None:
    bad = find(fault.bad, tmp_path / "bad", fault.check)
    assert bad.outcome == fault.outcome, bad
    assert fault.cause in f"{bad.evidence} {bad.fix} {bad.cost}", bad
    assert bad.fix
    sound = find(fault.ok, tmp_path / "ok", fault.check)
    assert sound.outcome == "ok", sound
    if fault.outcome != "unknown":
        missing = find(fault.missing, tmp_path / "missing", fault.check)
        assert missing.outcome == "unknown", missing


def test_there_are_enough_faults_and_every_check_has_one() -> None:
    assert len(FAULTS) >= 40
    # A source that cannot be read is the missing evidence itself.
    judged = {fault.check for fault in FAULTS if fault.outcome != "unknown"}
    assert judged | {"sources_readable"} == {fault.check for fault in FAULTS} == set(all_checks())
