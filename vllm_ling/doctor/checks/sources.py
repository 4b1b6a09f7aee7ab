# SPDX-License-Identifier: Apache-2.0
"""Whether the sources themselves could be read, and which vLLM they speak of."""

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, ok, unknown, warn
from vllm_ling.doctor.phrases import VERSIONS, known_version
from vllm_ling.doctor.registry import check


@check("static", "log", "live")
def sources_readable(facts: Facts) -> Verdict:
    """Every source that was named can be read: log file, /metrics, config.json, safetensors headers.

    A log that is binary, a page that never ends, a redirect to another host or a header that claims more bytes than the
    file has is reported here and read no further; the checks that needed it are *unknown*.
    """
    problems = [
        facts[f"problem.{name}"]
        for name in ("log", "metrics", "config", "headers")
        if f"problem.{name}" in facts
    ]
    if problems:
        return unknown("; ".join(problems), "name a readable source, then ask again")
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
