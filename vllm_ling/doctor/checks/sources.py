# SPDX-License-Identifier: Apache-2.0
"""Whether the sources themselves could be read, and which vLLM they speak of."""

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.phrases import VERSIONS, known_version
from vllm_ling.doctor.registry import check

# What mends a source that cannot be read.
_MEND = {
    "log": "name the server's own log, stdout and stderr from its start on: vllm-ling serve ... 2>&1 | tee server.log",
    "metrics": "name the address of a running vLLM server: --url http://HOST:PORT, without --disable-log-stats",
    "model": "name a checkpoint folder, or download the model first: hf download NAME",
    "config": "name a folder with the checkpoint's config.json",
    "headers": "see checkpoint_complete",
}


@check("static", "log", "live")
def sources_readable(facts: Facts) -> Verdict:
    """Every source that was named can be read: log file, /metrics, config.json, safetensors headers.

    A log that is binary or another program's, a page that never ends, a redirect to another host or a header that
    claims more bytes than the file has is reported here and read no further; the checks that needed it are *unknown*.
    """
    problems = {name: str(facts[f"problem.{name}"]) for name in _MEND if f"problem.{name}" in facts}
    if problems:
        return unknown("; ".join(problems.values()), _MEND[next(iter(problems))])
    return ok(f"read: {', '.join(sorted(facts.sources))}")


@check("log", "live")
def server_version(facts: Facts) -> Verdict:
    """The server's vLLM is one whose log phrases and series are known, and the one installed here.

    A local server that runs another vLLM was started from another environment, or before an upgrade: what doctor reads
    from the installed packages then says nothing about it.
    """
    version = str(facts["server.version"])
    if not known_version(version):
        return unknown(f"the server runs vLLM {version}; phrases are known for {', '.join(VERSIONS)}")
    installed = facts.get("installed.vllm")
    if (
        facts.get("server.local")
        and installed is not None
        and installed.partition("+")[0] != version.partition("+")[0]
    ):
        return warn(
            f"the server runs vLLM {version}, installed here is {installed}",
            "restart the server after an upgrade",
        )
    return ok(f"vLLM {version}")


# Piece of a start's error -> what mends it.
_START_FIXES = {
    "No available memory for the cache blocks": "more --gpu-memory-utilization, or a smaller --max-model-len",
    "KV cache": "a smaller --max-model-len, or fewer --max-num-seqs",
    "less than desired GPU memory utilization": "stop what holds memory, or a smaller --gpu-memory-utilization",
    "OutOfMemoryError": "a smaller --gpu-memory-utilization, or a smaller format (vllm-ling quantize)",
    "is not divisible by weight quantization": "--tensor-parallel-size 1: the blocks of these weights cannot be split",
    "Address already in use": "another --port, or stop the server that holds it",
}


@check("log")
def server_started(facts: Facts) -> Verdict:
    """The server came up: its log says so, or names what stopped it.

    A failed start prints tracebacks of several processes; the cause is the first error, not the last.
    """
    if facts["log.start"] == "done":
        return ok("the server came up")
    error = str(facts["log.start_error"])
    fix = next((fix for piece, fix in _START_FIXES.items() if piece in error), "mend what the error names")
    return fail(f"the server did not start: {error or 'see the tracebacks in the log'}", fix)
