# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and compilation: a decode step of this model is some 1,500 launches."""

from vllm_ling.doctor.checks.experts import device
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

_LAUNCHES = "about 1,500 launches a token go through the CPU one by one"
_COMPILING = "one to two minutes per start"


@check("static", "log", "live")
def graphs_on(facts: Facts) -> Verdict:
    """CUDA graphs are on: without them a decode step waits for its launches, not for memory."""
    if device(facts) == "cpu":
        return ok("no CUDA graphs on a CPU")
    eager = facts.get("engine.enforce_eager")
    eager = facts["serve.enforce_eager"] if eager is None else eager
    if eager:
        return fail(
            "--enforce-eager: CUDA graphs and compilation are off", "leave --enforce-eager out", _LAUNCHES
        )
    if facts.get("serve.optimization_level") == 0 and "engine.cudagraph_mode" not in facts:
        return fail("-O0: CUDA graphs and compilation are off", "leave -O out", _LAUNCHES)
    mode = facts.get("engine.cudagraph_mode", facts.get("serve.cudagraph_mode", "as vLLM chooses"))
    if facts.get("log.graphs_off") or str(mode).upper() == "NONE":
        return fail("cudagraph_mode is NONE", "leave cudagraph_mode out of --compilation-config", _LAUNCHES)
    if str(mode).upper() == "PIECEWISE":
        return warn(
            "cudagraph_mode is PIECEWISE: attention and KDA run outside the graphs",
            '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
            "the launches of attention and KDA go through the CPU one by one",
        )
    return ok(f"cudagraph_mode {mode}")


@check("static", "log", "live")
def graph_sizes(facts: Facts) -> Verdict:
    """The captured batch sizes cover decode and verify.

    With k drafts a step of one sequence holds k + 1 tokens; n sequences need n (k + 1). A batch above the largest
    captured size runs without a graph, from then on at every step.
    """
    if device(facts) == "cpu":
        return ok("no CUDA graphs on a CPU")
    sizes = facts.get("engine.capture_sizes", facts.get("serve.capture_sizes"))
    if sizes is None:
        if facts.sources == {"static"}:
            return ok("vLLM chooses the sizes")
        sizes = facts["engine.capture_sizes"]
    if not sizes:
        return ok("graphs are off, see graphs_on")
    k, largest = int(facts["serve.k"]), max(int(size) for size in sizes)
    users = facts.get("serve.max_num_seqs") or 1
    needed = int(users) * (k + 1)
    if largest < k + 1:
        return fail(
            f"the largest captured size is {largest}, but one sequence verifies {k + 1} tokens",
            f"--max-cudagraph-capture-size {needed}",
            _LAUNCHES,
        )
    if largest < needed and facts.get("serve.max_num_seqs"):
        return warn(
            f"the largest captured size is {largest}; {users} sequences verify {needed} tokens",
            f"--max-cudagraph-capture-size {needed}, or --max-num-seqs {max(1, largest // (k + 1))}",
            f"full batches only: {_LAUNCHES}",
        )
    return ok(f"captured up to {largest}, needed {needed if facts.get('serve.max_num_seqs') else k + 1}")


@check("static", "log")
def caches(facts: Facts) -> Verdict:
    """Compiled kernels are kept: the cache folders can be written, and a start finds what the last one compiled."""
    blocked = facts.get("cache.read_only", {}) if "static" in facts.sources else {}
    if blocked:
        name, folder = next(iter(blocked.items()))
        return warn(
            f"{folder} cannot be written: every start compiles again",
            f"set {name} to a folder that can be written",
            _COMPILING,
        )
    if "log.compiled" in facts:
        compiled, cached = facts["log.compiled"], facts["log.compile_cached"]
        if compiled and not cached and not facts["log.earlier_cold_starts"]:
            return unknown(
                f"this start compiled {compiled} graphs; whether they are kept shows at the next one",
                "start again and append to the same log",
            )
        if compiled and not cached:
            return warn(
                f"this start compiled {compiled} graphs and found none in the cache, as an earlier one in this log",
                "keep VLLM_CACHE_ROOT on a volume that survives restarts",
                _COMPILING,
            )
        return ok(f"{compiled} graphs compiled, {cached} from the cache")
    if "static" not in facts.sources:
        facts["log.compiled"]
    facts["cache.read_only"]
    return ok("cache folders can be written")
