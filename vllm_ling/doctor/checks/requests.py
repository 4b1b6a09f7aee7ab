# SPDX-License-Identifier: Apache-2.0
"""What is asked of the server, as far as it makes measurements meaningless."""

from vllm_ling.doctor.checks.drafting import POOR
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, ok, unknown, warn
from vllm_ling.doctor.registry import check

_FIX = "measure with real text: --dataset-name sharegpt, custom or hf, with --speculative-config as served"


@check("live", "bench")
def random_tokens(facts: Facts) -> Verdict:
    """A benchmark with speculation runs on text, not on random tokens.

    `--dataset-name random` asks for the continuation of noise with ignore_eos: nobody can draft that, and the speed
    says nothing about real use.
    """
    if facts.get("bench.dataset"):
        name = facts["bench.dataset"]
        if name.startswith("random"):
            return warn(f"the benchmark's dataset is {name!r}", _FIX)
        return ok(f"the benchmark's dataset is {name!r}")
    if not facts["serve.k"]:
        return ok("no speculation")
    finished = {reason: facts[f"recent.finished.{reason}"] for reason in ("stop", "length")}
    count = sum(finished.values())
    if count < 5:
        return unknown(
            f"only {count:.0f} requests ended between the two readings",
            "--interval 10 while the benchmark runs",
        )
    length = facts["recent.accept_length"]
    if finished["stop"] == 0 and length < POOR:
        return warn(
            f"all {count:.0f} requests ran to their limit with accept length {length:.2f}: this looks like a "
            "benchmark on random tokens with ignore_eos",
            _FIX,
        )
    return ok(
        f"{finished['stop']:.0f} of {count:.0f} requests ended by themselves; accept length {length:.2f}"
    )
