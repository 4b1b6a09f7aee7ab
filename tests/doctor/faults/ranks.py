# SPDX-License-Identifier: Apache-2.0
"""Injected faults: one of two ranks does something else than the other."""

from typing import Any

from tests.doctor.clean import RANK_RECORD, RANKS, two_ranks
from tests.doctor.evidence import LOG, Evidence, lines, live, without
from tests.doctor.faults.common import NO_OWN_SERIES, Fault

LOG_OF_TWO = two_ranks(LOG)
ONE_RECORD = live(RANKS, others={"VllmWorker-1": None})


def second_rank(**changes: Any) -> Evidence:
    """Two ranks, live, of which the second recorded something else."""
    return live(RANKS, others={"VllmWorker-1": {**RANK_RECORD, **changes}})


def choices(what: str, choice: str, reason: str) -> dict[str, Any]:
    """The record's choices with one of them changed."""
    return {**RANK_RECORD["choices"], what: {"what": what, "choice": choice, "reason": reason}}


def on_second(what: str, said: str) -> tuple[str, str]:
    """An edit of the second rank's lines."""
    return rf"^(\(Worker_TP1 .*vllm-ling: ){what}.*$", rf"\1{said}"


RANKS_APART = [
    Fault(
        "one rank on other experts",
        "ranks_agree",
        "warn",
        "moe mxfp4: humming on VllmWorker-0; marlin on VllmWorker-1",
        second_rank(choices=choices("moe mxfp4", "marlin", "auto measured marlin fastest")),
        RANKS,
        ONE_RECORD,
    ),
    Fault(
        "one rank kept the BF16 head",
        "ranks_agree",
        "warn",
        "lm_head: fp8_online on VllmWorker-0; bf16 on VllmWorker-1",
        second_rank(choices=choices("lm_head", "bf16", "the FP8 head failed its probe")),
        RANKS,
        NO_OWN_SERIES,
    ),
    Fault(
        "one rank on other experts, by log",
        "ranks_agree",
        "warn",
        "marlin on Worker_TP1 202",
        lines(LOG_OF_TWO, on_second("moe mxfp4 = ", "moe mxfp4 = marlin (ling.moe=marlin)")),
        LOG_OF_TWO,
        without(LOG_OF_TWO, r"Worker_TP1"),
    ),
    Fault(
        "one rank's head never compared",
        "ranks_agree",
        "unknown",
        "head_probe is not proven on Worker_TP1 202",
        without(LOG_OF_TWO, r"Worker_TP1 .*PROOF ok: head_probe"),
        LOG_OF_TWO,
    ),
    Fault(
        "one rank's head drifts",
        "proofs_hold",
        "fail",
        "head_probe",
        second_rank(proofs={}, faults={"head_probe": "the FP8 head drifts from the BF16 head"}),
        RANKS,
        NO_OWN_SERIES,
    ),
    Fault(
        "one rank without the plugin",
        "plugin_active",
        "fail",
        "VLLM_LING_DISABLE",
        second_rank(state="inactive", reason="VLLM_LING_DISABLE=1"),
        RANKS,
    ),
]
