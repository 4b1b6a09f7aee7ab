# SPDX-License-Identifier: Apache-2.0
"""Part `speed`: word problems one at a time for some minutes, in rounds whose spread says how steady it is."""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.finding import Outcome
from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import gpus, provenance
from vllm_ling.eval.report.result_file import Item, make, summarize
from vllm_ling.eval.runs.asking import Request, Sending, ask_items
from vllm_ling.eval.runs.gsm8k import quiet
from vllm_ling.eval.runs.journal import Journal
from vllm_ling.eval.runs.lm_tasks import load_task
from vllm_ling.eval.runs.questions import read_rows
from vllm_ling.eval.serving.client import CHAT
from vllm_ling.eval.serving.served import Served
from vllm_ling.roofline.bytes import ByteModel, HeadFormat
from vllm_ling.roofline.machines import matching_gpu
from vllm_ling.roofline.predict import predict
from vllm_ling.tiny.evaluate import load_heldout
from vllm_ling.verify.finding import Finding, judged
from vllm_ling.verify.gsm8k import server_problems
from vllm_ling.verify.settings import Verification

_A_ROUND = 4
_ROUNDS = 3
_MAX_TOKENS = 512
_NOISE = 1.05
_NEVER = 0.02
# Rounds differ in their questions, hence in acceptance; more than this is a busy or throttled machine.
_UNSTEADY = 0.35
# Shorter rounds are over before clocks settle.
_LONG_ENOUGH_S = 5.0
# Of the speed that the bytes allow; the slowest kernel measured reaches 0.38 of its floor.
_FLOOR_SHARE = 0.2
_FIX = "vllm-ling doctor --url URL --interval 4 while it answers names the cause; end what else runs on the machine"


def run(what: Verification, served: Served, folder: Path, console: Console) -> Finding:
    """Rounds until `minutes` are over, at least three; begun afresh after an interruption.

    Raises:
        LingError: the server stopped answering.
    """
    rows, kind = questions(what)
    rounds: list[list[Item]] = []
    started = time.monotonic()
    watcher = _Quiet()
    with Journal(folder / "speed.json.partial", {"model": served.model}, restart=True) as journal:
        while len(rounds) < _ROUNDS or time.monotonic() - started < 60 * what.minutes:
            number = len(rounds)
            picked = [rows[(number * _A_ROUND + i) % len(rows)] for i in range(_A_ROUND)]
            asked = [_request(served.model, f"{number}.{i}", row) for i, row in enumerate(picked)]
            how = Sending(served.url, CHAT, retries=0, warm_up=2 if number == 0 else 1)
            entries = ask_items(asked, how, journal, watcher)
            rounds.append([_item(entry) for entry in entries.values()])
            left = max(0.0, 60 * what.minutes - (time.monotonic() - started))
            if number % 5 == 4:
                speed = summarize(rounds[-1]).tok_per_s or 0.0
                console.print(f"  round {number + 1}: {speed:.1f} tok/s, {left:.0f} s left", markup=False)
        items = [item for found in rounds for item in found]
        origin = {**provenance(), "label": "verify speed", "workload": kind, "server": served.facts()}
        write_json(folder / "speed.json", make(origin, items).model_dump())
        journal.finish(folder / "speed.answers.jsonl")
    return judge(what, rounds, kind, server_problems(served))


def judge(
    what: Verification, rounds: Sequence[Sequence[Item]], kind: str, problems: list[tuple[Outcome, str]]
) -> Finding:
    """Speed with its spread, acceptance, and what is wrong with them."""
    s = summarize([item for found in rounds for item in found])
    found = list(problems)
    speeds = sorted(speed for items in rounds if (speed := summarize(items).tok_per_s))
    figures: dict[str, Any] = {**s.model_dump(), "rounds": len(rounds), "round_tok_per_s": speeds}
    if not speeds or s.tpot_ms is None:
        first = next((item.error for items in rounds for item in items if item.error), "no token counts")
        return judged("speed", [*found, ("fail", f"nothing could be timed: {first}")], [], figures, _FIX)
    middle, low, high = median(speeds), speeds[0], speeds[-1]
    if s.transport_errors:
        mostly = 2 * s.transport_errors > s.items
        found.append(("fail" if mostly else "warn", f"{s.transport_errors} of {s.items} requests failed"))
    found += _draft_problems(what.served_drafts, s.accept_length, s.acceptance)
    seconds = [sum(item.latency_s or 0.0 for item in items) for items in rounds]
    figure = (
        f"{middle:.1f} tok/s (rounds {low:.1f} to {high:.1f}), TPOT {s.tpot_ms:.2f} ms, TTFT {s.ttft_ms or 0:.0f} ms "
        f"over {s.items} {kind} in {len(rounds)} rounds"
    )
    said = [figure]
    if s.accept_length is not None:
        shares = ", ".join(f"{share:.0%}" for share in s.acceptance or [])
        said.append(f"accept length {s.accept_length:.2f} (positions {shares})")
    if median(seconds) < _LONG_ENOUGH_S:
        said.append(f"rounds of {median(seconds):.1f} s are too short to judge how steady that is")
    elif (high - low) / middle > _UNSTEADY:
        found.append(
            ("warn", f"unsteady: rounds from {low:.1f} to {high:.1f} tok/s; something else ran beside it")
        )
    if 0 < middle < what.expect_tok_per_s:
        kind_: Outcome = "fail" if middle < what.expect_tok_per_s / 2 else "warn"
        found.append((kind_, f"slow: {middle:.1f} tok/s where --expect-tok-s says {what.expect_tok_per_s:g}"))
    problem, words = _against_bytes(what, middle, s.accept_length)
    found += problem
    said.append(words)
    return judged("speed", found, said, figures, _FIX)


def _draft_problems(
    drafts: int, accept: float | None, acceptance: list[float] | None
) -> list[tuple[Outcome, str]]:
    if not drafts:
        return []
    if accept is None:
        return [("fail", f"{drafts} draft tokens were asked for, but none was counted")]
    if accept < _NOISE:
        return [("fail", f"accept length {accept:.2f} with {drafts} draft tokens: the draft is noise")]
    if acceptance and acceptance[-1] < _NEVER:
        return [("warn", f"draft position {len(acceptance)} is accepted {acceptance[-1]:.1%} of the time")]
    return []


def _against_bytes(
    what: Verification, speed: float, accept: float | None
) -> tuple[list[tuple[Outcome, str]], str]:
    """The speed as a share of what the bytes allow on this GPU, where that is known."""
    machine = matching_gpu(gpus()) if what.device == "cuda" else None
    if machine is None:
        return (
            [],
            "no byte floor known for this machine, so whether that is slow is judged by --expect-tok-s only",
        )
    shape = LingShape.from_folder(what.folder)
    wanted = what.options.get("lm_head", "auto")
    fp8 = wanted == "fp8" or (wanted == "auto" and shape.fmt != "bf16")
    head: HeadFormat = "fp8" if fp8 else "bf16"
    row = predict(ByteModel(shape, head=head, context=256), machine, what.served_drafts, accept or 1.0)
    share = speed / row.tokens_per_second
    text = f"{share:.0%} of the {row.tokens_per_second:.0f} tok/s that the bytes allow on {machine.name}"
    return ([("warn", f"slow: {text}")], "") if share < _FLOOR_SHARE else ([], text)


def questions(what: Verification) -> tuple[list[dict[str, str]], str]:
    """Rows with a question each, and what they are; the bundled problems where GSM8K cannot be had."""
    if what.data:
        return read_rows(Path(what.data)), "items of --data"
    if what.task != "tiny_ling":
        try:
            with quiet():
                docs = load_task(what.task, None, None, None).eval_docs
            return [{"question": str(doc["question"])} for doc in docs], "GSM8K items"
        except LingError:
            pass
    return load_heldout(), "bundled word problems"


def _request(model: str, name: str, row: dict[str, str]) -> Request:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": row["question"]}],
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return Request(name, body, digest[:16])


def _item(entry: dict[str, Any]) -> Item:
    return Item(**{k: v for k, v in entry.items() if k not in ("digest", "text")}, correct=None)


class _Quiet:
    """Rounds are too short for a bar of their own."""

    def begin(self, total: int, finished: int) -> None: ...

    def item(self, entry: Any) -> None: ...
