# SPDX-License-Identifier: Apache-2.0
"""With a draft gate running, figures that assume k tokens a round accuse nobody."""

from pathlib import Path

import pytest

from tests.doctor.evidence import Evidence, live
from tests.doctor.faults.common import accepted
from tests.doctor.faults.drafting import gate
from vllm_ling.doctor.registry import run_checks

RECORD = gate("bytes", "verifies 0 to 3 draft tokens").live
assert RECORD is not None


def outcomes(evidence: Evidence, folder: Path) -> dict[str, str]:
    return {finding.check: finding.outcome for finding in run_checks(evidence.facts(folder))[0]}


@pytest.mark.parametrize(
    ("check", "rates", "alone", "gated"),
    [
        ("draft_positions", (0.8, 0.5, 0.0), "warn", "ok"),
        ("speculation_pays", (0.3, 0.05, 0.02), "warn", "unknown"),
        ("draft_positions", (0.0, 0.0, 0.0), "fail", "fail"),
        ("accept_length", (0.01, 0.0, 0.0), "fail", "fail"),
    ],
)
def test_short_rounds_are_not_taken_for_long_ones(
    check: str, rates: tuple[float, ...], alone: str, gated: str, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "gated").mkdir()
    evidence = accepted(*rates)
    assert outcomes(evidence, tmp_path / "alone")[check] == alone
    assert RECORD is not None
    assert outcomes(live(evidence, record=RECORD.record), tmp_path / "gated")[check] == gated
