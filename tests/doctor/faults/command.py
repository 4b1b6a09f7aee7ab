# SPDX-License-Identifier: Apache-2.0
"""Injected faults: the serve command."""

from tests.doctor.evidence import LOG, STATIC, Evidence, but, lines
from tests.doctor.faults.common import NO_LOG, Fault, words


def speculating(config: str) -> Evidence:
    """The serve flags with other speculation settings."""
    return but(STATIC, words=words("--speculative-config", config, leave="--speculative-config"))


NO_VLLM = but(STATIC, vllm_source=False)

COMMAND = [
    Fault(
        "misspelt flag",
        "serve_flags",
        "fail",
        "did you mean --speculative-config?",
        but(STATIC, words=words("--sepculative-config", "{}")),
        STATIC,
        NO_VLLM,
    ),
    Fault(
        "flag value is no JSON",
        "serve_flags",
        "fail",
        "not a JSON object",
        speculating('{"method": mtp}'),
        STATIC,
        NO_VLLM,
    ),
    Fault(
        "config file missing",
        "serve_flags",
        "fail",
        "cannot be read",
        but(STATIC, words=words("--config", "no/such.yaml")),
        STATIC,
        NO_VLLM,
    ),
    Fault(
        "speculation without a method",
        "speculation_settings",
        "fail",
        "names no method",
        speculating('{"num_speculative_tokens": 3}'),
        STATIC,
        NO_LOG,
    ),
    Fault(
        "speculation with no tokens",
        "speculation_settings",
        "fail",
        "num_speculative_tokens is 0",
        speculating('{"method": "mtp", "num_speculative_tokens": 0}'),
        STATIC,
        NO_LOG,
    ),
    Fault(
        "speculation by lot",
        "speculation_settings",
        "fail",
        "rejection_sample_method",
        speculating('{"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}'),
        STATIC,
        NO_LOG,
    ),
    Fault(
        "speculation with another head",
        "speculation_settings",
        "fail",
        "'eagle'",
        speculating('{"method": "eagle", "model": "x/y", "num_speculative_tokens": 3}'),
        STATIC,
        speculating('{"method": "mtp", "num_speculative_tokens": "three"}'),
    ),
    Fault(
        "dummy weights",
        "weights_real",
        "fail",
        "random",
        lines(LOG, ("'max_num_seqs'", "'load_format': 'dummy', 'max_num_seqs'")),
    ),
    Fault(
        "graphs off by level",
        "graphs_on",
        "fail",
        "-O0",
        but(STATIC, words=words("-O0")),
        STATIC,
        NO_LOG,
    ),
]
