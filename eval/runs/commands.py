# SPDX-License-Identifier: Apache-2.0
"""The commands `vllm-ling eval gsm8k|synthetic` from their options to exit code and printed figures."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ling.errors import LingError
from vllm_ling.eval.interrupt import interruptible
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
