# SPDX-License-Identifier: Apache-2.0
"""Doctor's static part as `vllm-ling serve` runs it: one line before the server starts, or the end with `--strict`."""

import sys
from collections.abc import Sequence

from vllm_ling.doctor.finding import Finding
from vllm_ling.doctor.run import examine
from vllm_ling.errors import LingError


def look(argv: Sequence[str], strict: bool) -> None:
    """Prints one line on stderr about the first thing that is wrong, or that nothing is.

    Doctor must never be the reason why a server does not start: without `strict`, an error of its own is only named.

    Raises:
        LingError: with `strict`, for the first failed check.
    """
    try:
        findings, _, facts = examine(argv)
    except Exception as error:
        print(
            f"vllm-ling: doctor: did not finish ({type(error).__name__}: {error})",
            file=sys.stderr,
            flush=True,
        )
        return
    if not facts.get("checkpoint.is_ling", False):  # another model, or one that is not here yet
        return
    bad = [f for outcome in ("fail", "warn") for f in findings if f.outcome == outcome]
    if strict and bad and bad[0].outcome == "fail":
        raise LingError(f"--strict: {_said(bad[0])}")
    counts = {
        outcome: sum(f.outcome == outcome for f in findings) for outcome in ("fail", "warn", "unknown", "ok")
    }
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    more = f"; {_said(bad[0])}" if bad else ""
    print(f"vllm-ling: doctor: {summary}{more}", file=sys.stderr, flush=True)


def _said(finding: Finding) -> str:
    return f"{finding.outcome} {finding.check}: {finding.evidence} -> {finding.fix}"
