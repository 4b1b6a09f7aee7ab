# SPDX-License-Identifier: Apache-2.0
"""Memory: KV and state cache, preemption, unified memory, prefix caching."""

from vllm_ling.doctor.compare import mtp_prefixes
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

UNIFIED_LIMIT, UNIFIED_RISK = 0.9, 0.86
_VLLM_DEFAULT = 0.92
_LEAST_ROOM = 3e9
_AGAIN = "every prompt is computed from its first token on"


@check("static")
def weights_fit(facts: Facts) -> Verdict:
    """The checkpoint's weights fit into the share of memory that vLLM may take, with room for the cache.

    Found before a load of minutes ends in an out-of-memory error, or on a DGX Spark in a system that no longer answers.
    """
    if facts["gpu.names"] == []:
        return ok("no GPU on this machine")
    ranks = int(facts["serve.tensor_parallel_size"] or 1)
    share, memory = _share(facts), facts["gpu.memory_bytes"]
    weights = facts["checkpoint.bytes"]
    if not facts["serve.k"]:
        layers = mtp_prefixes(facts["_checkpoint.shape"])
        headers = facts["_checkpoint.headers"]
        weights -= sum(info.nbytes for name, info in headers.items() if layers and name.startswith(layers))
    left = share * memory - weights / ranks
    said = (
        f"{weights / ranks / 1e9:.1f} GB of weights per GPU, {share:g} of {memory / 1e9:.1f} GB may be used"
    )
    if left <= 0:
        return fail(
            said,
            "vllm-ling quantize SRC DST --format fp4"
            if facts["checkpoint.format"] in ("bf16", "fp8")
            else f"--tensor-parallel-size {2 * ranks}, or a smaller model",
        )
    if left < _LEAST_ROOM:
        return warn(
            f"{said}: {left / 1e9:.1f} GB are left for activations and cache",
            f"--tensor-parallel-size {2 * ranks}, or a shorter --max-model-len",
        )
    return ok(f"{said}: {left / 1e9:.0f} GB are left")


def _share(facts: Facts) -> float:
    share = facts["serve.gpu_memory_utilization"]
    return _VLLM_DEFAULT if share is None else float(share)


@check("live")
def preemptions(facts: Facts) -> Verdict:
    """No request lost its KV cache and state while it ran: a preempted one is computed again from its first token."""
    count = facts["recent.vllm:num_preemptions_total"]
    if count:
        return fail(
            f"{count:.0f} preemptions ({facts.origin('recent.vllm:num_preemptions_total')})",
            "fewer --max-num-seqs, a shorter --max-model-len, or more --gpu-memory-utilization",
            "each one computes its prompt and all its answer so far again",
        )
    return ok("no preemption between the two readings")


@check("log", "live")
def cache_size(facts: Facts) -> Verdict:
    """The KV and state cache holds at least one request of full length, and as many as may run together."""
    room = float(facts["log.kv_concurrency"])
    if room < 1:
        return fail(
            f"the cache holds {room:.2f} requests of full length", "a shorter --max-model-len, or more memory"
        )
    users = facts.get("serve.max_num_seqs")
    if users and 1 < int(users) <= 16 and room < int(users):
        return warn(
            f"the cache holds {room:.2f} requests of full length, --max-num-seqs is {users}",
            f"--max-num-seqs {max(1, int(room))}, or a shorter --max-model-len",
        )
    return ok(f"room for {room:.1f} requests of full length")


@check("static", "log", "live")
def unified_memory(facts: Facts) -> Verdict:
    """On unified memory (GB10) vLLM leaves the system enough.

    --gpu-memory-utilization counts the whole memory, the system's part included; above 0.9 a DGX Spark swaps or its
    driver locks up.
    """
    if facts.get("engine.device") == "cpu":
        return ok("no GPU")
    if facts["gpu.names"] == []:
        return (
            unknown("no GPU on this machine", "run doctor on the server's machine")
            if facts.sources != {"static"}
            else ok("no GPU on this machine")
        )
    if not facts["gpu.unified"]:
        return ok(f"{facts['gpu.names'][0]}: memory of its own")
    share = _share(facts)
    fix = "--gpu-memory-utilization 0.85"
    if not 0 < share <= 1:
        return fail(f"gpu_memory_utilization {share:g} is no share between 0 and 1", fix)
    if share >= UNIFIED_LIMIT:
        return fail(
            f"gpu_memory_utilization {share:g} on {facts['gpu.names'][0]}, which shares it with the system",
            fix,
        )
    if share > UNIFIED_RISK:
        return warn(f"gpu_memory_utilization {share:g} on {facts['gpu.names'][0]}", fix)
    if facts.sources == {"static"}:  # vLLM compares with what is available when it starts
        total, free = facts["gpu.memory_bytes"], facts["gpu.available_bytes"]
        if free < share * total:
            return fail(
                f"{free / 1e9:.0f} of {total / 1e9:.0f} GB are available, vLLM would ask for {share * total / 1e9:.0f} "
                "and refuse to start",
                f"stop what holds memory (another server?), or --gpu-memory-utilization "
                f"{int(100 * free / total) / 100:g}",
            )
    return ok(f"gpu_memory_utilization {share:g}")


@check("log", "live")
def prefix_caching(facts: Facts) -> Verdict:
    """Prefix caching is on if it was asked for, and finds something.

    On this hybrid the KDA state is cached only at aligned block ends; vLLM switches caching off in some set-ups with
    one line in the log, and short shared prefixes never hit.
    """
    enabled = facts["engine.enable_prefix_caching"]
    asked = facts.get("serve.enable_prefix_caching")
    # Only a log can tell that it was switched off in between; a log that cannot is no evidence.
    why = (facts["log.prefix_off"] or [""])[0] if "log" in facts.sources else ""
    if asked and (not enabled or why):
        return fail(
            f"--enable-prefix-caching was asked for, but it is off{': ' + why if why else ''}",
            "leave the flag out, or remove what the log line names",
            _AGAIN,
        )
    if enabled and why and facts.get("engine.device") != "cpu":
        return warn(f"prefix caching was switched off: {why}", "remove what the log line names", _AGAIN)
    if not enabled:
        return ok("prefix caching is off, and was not asked for")
    if "live" not in facts.sources:
        return ok("prefix caching is on")
    queries = facts["recent.vllm:prefix_cache_queries_total"]
    hits = facts["recent.vllm:prefix_cache_hits_total"]
    if queries >= 20_000 and hits == 0:
        return warn(
            f"{queries:,.0f} prompt tokens were looked up and none was found",
            "--no-enable-prefix-caching, if prompts share no long prefix",
        )
    return ok(f"prefix caching is on; {hits:,.0f} of {queries:,.0f} prompt tokens found")
