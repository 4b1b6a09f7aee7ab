# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling demo`: serves tiny-ling once per stage, asks held-out problems over the OpenAI API, compares."""

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from vllm_ling.errors import LingError
from vllm_ling.eval.demo.stages import DRAFT_TOKENS, STAGES, Stage, StageRun, broken_bars, what_caught
from vllm_ling.eval.demo.table import DemoReport, StageResult, stage_table
from vllm_ling.eval.files import write_json
from vllm_ling.eval.interrupt import interruptible
from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.serving.client import Answer, ask_all
from vllm_ling.eval.serving.metrics import read_counters
from vllm_ling.eval.serving.servers import HOST, Server, ServerError, free_port, running
from vllm_ling.tiny.problems import HELDOUT_PATH, final_number

MODEL = "tiny-ling"
SERVE = (sys.executable, "-m", "vllm_ling.cli", "serve")
CONCURRENCY = 8
MAX_TOKENS = 160
SERIAL_ITEMS = 8
WARM_UP_ITEMS = 2
# The servers need no network, no telemetry and little memory; what the user has set wins.
SERVER_ENV = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(*, items: int, out: Path, stages: Sequence[str] = (), server: Sequence[str] = SERVE) -> int:
    """Runs the stages, prints a table, writes `out`; returns 0, 1 if a bar is broken, or 128 + signal if stopped.

    Args:
        items: held-out problems per stage; the first eight (or a quarter) go one at a time and are timed.
        out: JSON file; server logs go to `logs/` beside it.
        stages: names of stages to run, in any order; none means all.
        server: command that `MODEL --flag ...` is appended to.

    Raises:
        LingError: for unknown stages or too many items, or if a server fails (its last log lines are printed).
    """
    chosen = _choose(stages)
    questions = _load(items)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )

    def work() -> int:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            runs = [
                _Stage(stage, f"[{number}/{len(chosen)}] {stage.name}", progress).run(questions, out, server)
                for number, stage in enumerate(chosen, 1)
            ]
        _write(out, runs)
        return _judge(console, runs, out)

    try:
        return interruptible(work, "no server is left")
    except ServerError as error:
        console.print(error.tail, markup=False)
        raise


def summarize(
    name: str,
    serial: Sequence[Answer],
    right: Sequence[bool],
    answers: Sequence[Answer],
    accept_length: float | None,
    flagged: bool,
) -> StageResult:
    """Figures of one stage: speed from the `serial` answers, the rest from all `answers` (failed ones left out)."""
    timed = [answer for answer in serial if answer.tpot_s is not None]
    if not timed:
        raise LingError(f"stage {name}: no request came back with more than one token")
    return StageResult(
        name=name,
        accuracy=sum(right) / len(answers),
        items=len(answers),
        accept_length=accept_length,
        tok_per_s=round(
            sum(answer.decoded for answer in timed) / sum(answer.decode_s for answer in timed), 2
        ),
        tpot_ms=round(1000 * statistics.median(answer.tpot_s or 0.0 for answer in timed), 3),
        ttft_ms=round(1000 * statistics.median(answer.ttft_s for answer in timed), 2),
        median_output_tokens=statistics.median(answer.tokens for answer in answers),
        flagged=flagged,
    )


class _Stage:
    """One stage under way, with its line in the progress display."""

    def __init__(self, stage: Stage, label: str, progress: Progress) -> None:
        self.stage, self.label, self.progress = stage, label, progress

    def run(self, questions: Sequence[dict[str, str]], out: Path, command: Sequence[str]) -> StageRun:
        port, flags = free_port(), server_flags(self.stage)
        env = {name: value for name, value in SERVER_ENV.items() if name not in os.environ}
        log = out.parent / "logs" / f"demo-{self.stage.name}.log"
        task = self._task("starting the server", None)
        with running([*command, MODEL, "--port", str(port), *flags], port=port, log=log, env=env) as server:
            self.progress.remove_task(task)
            self._say(f"ready after {server.ready_s:.0f} s")
            return self._measure(server, questions, {"flags": flags, "start_s": round(server.ready_s, 1)})

    def _measure(self, server: Server, rows: Sequence[dict[str, str]], facts: dict[str, Any]) -> StageRun:
        asked, extra = rows[:-WARM_UP_ITEMS], rows[-WARM_UP_ITEMS:]
        serial = max(1, min(SERIAL_ITEMS, len(asked) // 4))
        self._ask(server, extra, 1, "warming up")
        before = read_counters(server.url)
        answers = self._ask(server, asked[:serial], 1, f"{serial} problems one at a time")
        answers += self._ask(
            server, asked[serial:], CONCURRENCY, f"{len(asked) - serial} problems, {CONCURRENCY} at a time"
        )
        accept_length = read_counters(server.url).since(before).accept_length
        pairs = [(answer, row) for answer, row in zip(answers, asked, strict=True) if answer.error is None]
        errors = [answer.error for answer in answers if answer.error is not None]
        if not pairs:
            raise LingError(f"stage {self.stage.name}: every request failed, the first with {errors[0]}")
        faults = server.faults()
        result = summarize(
            self.stage.name,
            [answer for answer in answers[:serial] if answer.error is None],
            [final_number(answer.text) == final_number(row["answer"]) for answer, row in pairs],
            [answer for answer, _ in pairs],
            accept_length,
            bool(faults),
        )
        self._say(
            f"accuracy {result.accuracy:.1%}, {result.tok_per_s:.1f} tok/s" + (", FAULT" if faults else "")
        )
        return StageRun(self.stage, result, faults, errors, facts)

    def _ask(
        self, server: Server, rows: Sequence[dict[str, str]], concurrency: int, what: str
    ) -> list[Answer]:
        task = self._task(what, len(rows))
        answers = asyncio.run(
            ask_all(
                server.url,
                MODEL,
                [row["question"] for row in rows],
                concurrency=concurrency,
                max_tokens=MAX_TOKENS,
                on_answer=lambda: self.progress.advance(task),
            )
        )
        self.progress.remove_task(task)
        server.check()
        return answers

    def _task(self, what: str, total: int | None) -> TaskID:
        self._say(what)
        return self.progress.add_task(f"{self.label}: {what}", total=total)

    def _say(self, text: str) -> None:
        self.progress.console.print(f"{self.label}: {text}", markup=False)


def server_flags(stage: Stage) -> list[str]:
    """Flags of a stage's server, without model and port."""
    # Eager: compiling would take longer than all that is measured here.
    flags = ["--host", HOST, "--dtype", "bfloat16", "--enforce-eager"]
    flags += ["--max-num-seqs", str(CONCURRENCY), "--max-model-len", "512"]
    flags += ["--additional-config", json.dumps({"ling": stage.options})]
    if stage.speculates:
        flags += [
            "--speculative-config",
            json.dumps({"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}),
        ]
    return flags


def _choose(names: Sequence[str]) -> list[Stage]:
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in names if name not in known]:
        raise LingError(f"--stages: unknown stage {', '.join(unknown)} (known: {', '.join(known)})")
    return [stage for stage in STAGES if not names or stage.name in names]


def _load(items: int) -> list[dict[str, str]]:
    """The first `items` held-out problems, then some of the last ones for the warm-up."""
    rows = [json.loads(line) for line in HELDOUT_PATH.read_text(encoding="utf-8").splitlines()]
    if items > len(rows):
        raise LingError(f"--items {items}: there are {len(rows)} held-out problems")
    return rows[:items] + rows[-WARM_UP_ITEMS:]


def _write(out: Path, runs: Sequence[StageRun]) -> None:
    facts = {
        run.stage.name: {**run.facts, "faults": run.faults, "transport_errors": len(run.errors)}
        for run in runs
    }
    method = {"concurrency": CONCURRENCY, "max_tokens": MAX_TOKENS, "timed_one_at_a_time": SERIAL_ITEMS}
    report = DemoReport(
        provenance={**provenance(), "model": MODEL, "method": method, "stages": facts},
        stages=[run.result for run in runs],
    )
    write_json(out, report.model_dump())


def _judge(console: Console, runs: Sequence[StageRun], out: Path) -> int:
    console.print(stage_table([(run.result, run.stage.adds) for run in runs]))
    for run in runs:
        if run.stage.trap:
            console.print(what_caught(run), style="red", markup=False, soft_wrap=True)
    console.print(f"written: {out}", markup=False)
    broken = broken_bars(runs)
    for bar in broken:
        console.print(f"FAILED {bar}", style="bold red", markup=False, soft_wrap=True)
    return int(bool(broken))
