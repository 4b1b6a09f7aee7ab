# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling bench decode`: ms per token of Ling-3.0-flash with random weights, our classes against stock vLLM's.

Each engine (a side and a workload) is started anew on the same machine, one after the other, ours and stock in turn, by
a front end in another process, as vLLM does by default. A figure is the time between an early and the last token of an
answer, so that prompt and start-up stay out. Random weights accept nothing, so speculation is timed with vLLM's
synthetic acceptance of a given length. `rows.py` says what the result holds.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_ling.bench.dram import step_traffic
from vllm_ling.bench.processes import run_limited
from vllm_ling.bench.report import write_report
from vllm_ling.bench.rows import add_answer, add_failure, add_traffic, new_result
from vllm_ling.bench.side import Answer, Side, read_answer
from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_json
from vllm_ling.options import parse_options

OURS: dict[str, Any] = {"moe": "ling", "linear": "ling"}


@dataclass(frozen=True)
class Plan:
    """What the command was asked for.

    Attributes:
        model, layers, contexts: see `Side`.
        drafts, accept: MTP draft lengths (0: plain), each a workload; the accept length of those that draft.
        ours: options of our sides as JSON text; empty is the default.
        stock: also time stock vLLM.
        extras: "also" adds prefill and 32 sequences, "only" measures nothing else.
        dram: also read DRAM counters with ncu, for plain decode of our sides.
        merge: keep what `out` already holds from an earlier call.
        timeout: seconds for one engine.
    """

    model: str
    layers: int
    contexts: tuple[int, ...]
    drafts: tuple[int, ...]
    accept: float
    ours: tuple[str, ...]
    stock: bool
    extras: str
    dram: bool
    merge: bool
    out: Path
    timeout: int


def engines(plan: Plan) -> list[tuple[str, Side]]:
    """The engines in the order in which they run: workload by workload, our sides, then stock.

    Raises:
        LingError: naming the option that does not fit.
    """
    for draft in plan.drafts:
        if draft and not 1 <= plan.accept <= draft + 1:
            raise LingError(
                f"--accept-length {plan.accept:g}: with --draft {draft} it lies between 1 and {draft + 1}"
            )
    options = [_options(text) for text in plan.ours] or [OURS]
    sides: dict[str, dict[str, Any] | None] = {
        f"ours{n}" if n > 1 else "ours": section for n, section in enumerate(options, 1)
    }
    if plan.stock:
        sides["stock"] = None
    common: dict[str, Any] = {"model": plan.model, "layers": plan.layers, "contexts": plan.contexts}
    workloads: list[dict[str, Any]] = [
        {"draft_tokens": draft, "accept_length": plan.accept if draft else 0.0}
        for draft in dict.fromkeys(plan.drafts)
        if plan.extras != "only"
    ]
    if plan.extras != "none":
        workloads.append({"extras": True})
    return [
        (name, Side(section, **common, **workload))
        for workload in workloads
        for name, section in sides.items()
    ]


def _options(text: str) -> dict[str, Any]:
    try:
        section = json.loads(text)
    except ValueError:
        section = None
    if not isinstance(section, dict):
        raise LingError(f'--ours {text}: expected a JSON object of ling options, such as {{"moe": "ling"}}')
    parse_options({"ling": section})
    return section


def time_side(side: Side, timeout_s: float) -> Answer:
    """Runs one engine in a fresh process. What it had measured before it failed or ran out of time comes back.

    Raises:
        LingError: it failed or took longer than `timeout_s` before its first figure; with the end of its log.
    """
    what = "stock vLLM" if side.options is None else f"ling {json.dumps(side.options)}"
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "answer.json"), Path(folder, "log")
        env = os.environ | {"VLLM_LING_DISABLE": "1" if side.options is None else "0"}
        command = [sys.executable, "-m", "vllm_ling.bench.worker", json.dumps(asdict(side)), str(path)]
        code = run_limited(command, env, log, timeout_s)
        failed = ""
        if code != 0:
            why = "failed" if code is not None else f"took longer than {timeout_s:.0f} s (--timeout)"
            failed = f"bench decode: {what} {why}: {log.read_text(errors='replace')[-3000:]}"
        answer = read_answer(json.loads(path.read_text())) if path.exists() else None
    if answer is None or not (answer.decoded or answer.extras):
        raise LingError(failed or f"bench decode: {what} measured nothing")
    answer.failed = failed
    return answer


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the result; `plan.out` is written after every engine, so little is lost if that ends."""
    sides = engines(plan)
    result = new_result(plan.out if plan.merge else None)
    for name, side in sides:
        label = f"{name} {side.workload}"
        say(f"{label}: starting")
        try:
            answer = time_side(side, plan.timeout)
        except LingError as error:
            add_failure(result, label, str(error))
        else:
            add_answer(result, name, side, answer)
            for decoded in answer.decoded:
                say(
                    f"{label}: context {decoded.context}: {decoded.ms:.3f} ms a token "
                    f"({decoded.low:.3f} to {decoded.high:.3f})"
                )
            for extra in answer.extras:
                say(f"{label}: {extra.workload}: {extra.ms:.3f} ms ({extra.low:.3f} to {extra.high:.3f})")
            for note in answer.notes:
                say(f"{label}: {note}")
        if label in result["errors"]:
            say(f"{label}: FAILED: {result['errors'][label]}")
        write_json(plan.out, result)
    for name, side in sides if plan.dram else []:
        if side.options is not None and side.workload == "plain":
            say(f"{name} plain: DRAM counters")
            traffic = step_traffic(side)
            add_traffic(result, name, side, traffic)
            say(f"{name} plain: DRAM bytes a step: {traffic.total or 'unknown'} ({traffic.note})")
            write_json(plan.out, result)
    return result


def decode(plan: Plan) -> int:
    """The command. Returns the exit code: 1 if an engine failed.

    Raises:
        LingError: an option does not fit.
    """
    started = time.monotonic()
    result = run(plan, lambda text: print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True))
    for row in result["rows"]:
        if row["ms_per_token"] and row.get("stock_ms_per_token"):
            ratio = row["stock_ms_per_token"] / row["ms_per_token"]
            print(f"{row['workload']}, context {row['context']}: {ratio:.2f} x as fast as stock vLLM")
    write_report(plan.out)
    print(f"written: {plan.out}, with .md and .svg beside it")
    return 1 if result["errors"] else 0
