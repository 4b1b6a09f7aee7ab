# SPDX-License-Identifier: Apache-2.0
"""Injected faults: drafting and acceptance."""

from tests.doctor.evidence import LIVE, LOG, Evidence, but, chosen, lines, live, without
from tests.doctor.faults.common import IDLE, LITTLE, NO_OWN_SERIES, Fault, accepted, ling, record

_GUARD = "(APIServer pid=100) ERROR 12-01 10:05:00 [status.py:121] vllm-ling: "
TAIL_ALARM = f"{_GUARD}ALARM draft_tail: the last 1 of 3 draft positions are practically never accepted\n"
NOISE_ALARM = f"{_GUARD}ALARM draft_chance: drafts are noise\n"
NOISE_OVER = f"{_GUARD}draft_chance: over: accept length 2.60 over 2000 rounds\n"

NO_GRAPHS = "CUDA graphs of one request cover [3] draft tokens, and no shorter verification"


def gate(choice: str, reason: str) -> Evidence:
    """A live server that recorded this of its draft gate."""
    gated = {"draft_gate": {"what": "draft_gate", "choice": choice, "reason": reason}}
    return record(choices=chosen() | gated)


DRAFTING = [
    Fault(
        "draft gate without graphs",
        "draft_gate",
        "warn",
        NO_GRAPHS,
        gate("off", NO_GRAPHS),
        gate("bytes", "verifies 0 to 3 draft tokens"),
        NO_OWN_SERIES,
    ),
    Fault(
        "draft gate without graphs, by log",
        "draft_gate",
        "warn",
        "ling.draft_gate=bytes does not run",
        lines(
            LOG,
            ling(draft_gate="bytes"),
            (r"^(.*vllm-ling: )lm_head = .*$", rf"\g<0>\n\1draft_gate = off ({NO_GRAPHS})"),
        ),
        LOG,
        lines(LOG, ling(draft_gate="bytes")),
    ),
    Fault("accepted at chance", "accept_length", "fail", "noise", accepted(0.01, 0.0, 0.0), LIVE, IDLE),
    Fault(
        "accepted at chance, by log",
        "accept_length",
        "fail",
        "noise",
        lines(
            LOG,
            ("length: 2.68", "length: 1.01"),
            ("Accepted: 336", "Accepted: 2"),
            ("0.780, 0.540, 0.360", "0.010, 0.000, 0.000"),
        ),
        LOG,
        without(LOG, "SpecDecoding"),
    ),
    Fault(
        "accepted poorly",
        "accept_length",
        "warn",
        "accept length 1.20",
        accepted(0.15, 0.05, 0.0),
        LIVE,
        IDLE,
    ),
    Fault(
        "last position never accepted",
        "draft_positions",
        "warn",
        "position 3 of 3",
        accepted(0.8, 0.5, 0.0),
        LIVE,
        IDLE,
    ),
    Fault(
        "no position accepted",
        "draft_positions",
        "fail",
        "no position",
        accepted(0.0, 0.0, 0.0),
        LIVE,
        live(LIVE, traffic=LITTLE),
    ),
    Fault(
        "alarm while nobody looked",
        "draft_alarms",
        "fail",
        "draft_chance stands",
        live(IDLE, acceptance=(0, 0, 0)),
        IDLE,
        live(IDLE, acceptance=None),
    ),
    Fault(
        "alarm in the log",
        "draft_alarms",
        "warn",
        "draft_tail stands",
        but(LOG, log=f"{LOG.log}{TAIL_ALARM}{NOISE_ALARM}{NOISE_OVER}"),
        but(LOG, log=f"{LOG.log}{NOISE_ALARM}{NOISE_OVER}"),
        without(LOG, "vllm-ling: "),
    ),
    Fault(
        "slower than no speculation",
        "speculation_pays",
        "warn",
        "times the bytes",
        accepted(0.3, 0.05, 0.02),
        LIVE,
        IDLE,
    ),
    Fault(
        "too many together",
        "concurrency",
        "warn",
        "16 requests",
        live(LIVE, gauges={"vllm:num_requests_running": 16.0}),
        LIVE,
        live(LIVE, gauges={"vllm:num_requests_running": None}),
    ),
    Fault(
        "level-2 sleep",
        "level_2_sleep",
        "fail",
        "discarded",
        live(LIVE, level_2_sleeps=1),
        LIVE,
        NO_OWN_SERIES,
    ),
    Fault(
        "level-2 sleep, by log",
        "level_2_sleep",
        "fail",
        "discarded",
        but(
            LOG,
            log=LOG.log + 'INFO: 127.0.0.1:1 - "POST /sleep?level=2 HTTP/1.1" 200 OK\n' if LOG.log else "",
        ),
    ),
]
