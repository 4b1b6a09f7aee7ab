# SPDX-License-Identifier: Apache-2.0
"""The command: collects facts from the named sources, runs the checks, prints, returns the exit code."""

import gc
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vllm_ling.doctor.facts.checkpoint import read_checkpoint
from vllm_ling.doctor.facts.environment import read_environment
from vllm_ling.doctor.facts.gpu import read_gpus
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.settings import put_command
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Finding, exit_code
from vllm_ling.doctor.registry import all_checks, run_checks
from vllm_ling.doctor.text import clean
from vllm_ling.errors import LingError


def run(
    words: Sequence[str],
    url: str | None = None,
    log: Path | None = None,
    interval_s: float = 2.0,
    json_output: bool = False,
    explain: str | None = None,
    everything: bool = False,
) -> int:
    """Runs `vllm-ling doctor` and returns its exit code: 0 ok, 1 warn, 2 fail, 3 unknown.

    Args:
        words: model and serve flags, as for `vllm-ling serve`.
        url: a running server, read live.
        log: a server log, read post mortem.
        interval_s: time between the two readings of /metrics.
        explain: a check's name; prints what it looks for and does nothing else.

    Raises:
        LingError: nothing to examine, or an unknown check.
    """
    from vllm_ling.doctor.render import as_json, print_about, print_findings

    if explain is not None:
        checks = all_checks()
        if explain not in checks:
            raise LingError(f"--explain {explain}: no such check; there are {', '.join(checks)}")
        print_about(explain, checks[explain].about, frozenset(checks[explain].sources))
        return 0
    if not words and url is None and log is None:
        raise LingError("doctor: name a model (with the flags to serve it), --url URL or --log FILE")
    if not 0 < interval_s <= 600:
        raise LingError(f"--interval {interval_s}: above 0 and up to 600 seconds")
    if url is not None:
        _check_url(url)
    findings, idle, facts = examine(words, url, log, interval_s)
    if json_output:
        print(as_json(findings, facts, idle))
    else:
        print_findings(findings, idle, everything)
    return exit_code(findings)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        named = False
    if not named:
        raise LingError(f"--url {clean(url, 80)}: must be like http://127.0.0.1:8000")


def examine(
    words: Sequence[str],
    url: str | None = None,
    log: Path | None = None,
    interval_s: float = 2.0,
    env: Mapping[str, str] | None = None,
) -> tuple[list[Finding], list[str], Facts]:
    """Findings, names of the checks that had no source, and the facts."""
    # Compatibility notes of the Hugging Face cache and the like are not findings.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    facts = Facts()
    if url is not None:
        from vllm_ling.doctor.facts.server import read_server

        read_server(facts, url, interval_s)
    if log is not None:
        read_log(facts, log)
    named = put_command(facts, words) if words else None
    read_environment(facts, env)
    _server_gpus(facts)
    # A server may know its files under another path, or tell nothing but the name under which it serves them.
    model = named or facts.get("serve.model") or facts.get("server.model_name")
    collecting = gc.isenabled()
    gc.disable()  # half a million small objects without cycles: looking for some takes a quarter of the time
    try:
        if model:
            read_checkpoint(facts, str(model))
        else:
            facts.lacks("checkpoint.", "no source names the model; name it too: vllm-ling doctor MODEL ...")
        findings, idle = run_checks(facts)
    finally:
        if collecting:
            gc.enable()
    return findings, idle, facts


def _server_gpus(facts: Facts) -> None:
    """This machine's GPUs, unless the server evidently runs on another one."""
    here = Facts()
    read_gpus(here)
    if facts.get("server.local") is False:
        facts.lacks("gpu.", "the server runs on another machine: run doctor there")
    elif facts.get("engine.device") == "cuda" and here.get("gpu.names") == []:
        facts.lacks("gpu.", "the server has a GPU and this machine has none: run doctor there")
    else:
        read_gpus(facts)
