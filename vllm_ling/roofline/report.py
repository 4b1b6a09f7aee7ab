# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ling roofline` prints: the parts of a token, then predicted TPOT and tok/s."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

from vllm_ling.checkpoint.shapes import Format
from vllm_ling.errors import LingError
from vllm_ling.roofline.bytes import ByteModel, HeadFormat, accept_length
from vllm_ling.roofline.machines import MACHINES, Machine, machine, measure
from vllm_ling.roofline.models import model_shape
from vllm_ling.roofline.predict import Row, parse_ks, predict, read_results

# Per-position acceptance that gives the accept length of 2.69 at k = 3 published for GSM8K on this model.
PUBLISHED_ACCEPTANCE = 0.74


def run(
    model: str,
    fmt: str | None,
    head: str,
    ks: str | None,
    acceptance: float,
    length: float | None,
    context: int,
    machines: list[str],
    measure_here: bool,
    results: Path | None,
    as_json: bool,
) -> None:
    """Prints the prediction.

    Raises:
        LingError: naming the option that does not fit.
    """
    shape = model_shape(model, cast(Format | None, fmt))
    stored = cast(HeadFormat, ("bf16" if shape.fmt == "bf16" else "fp8") if head == "auto" else head)
    bytes_model = ByteModel(shape, head=stored, context=context)
    if not 0 <= acceptance <= 1:
        raise LingError(f"--acceptance {acceptance}: a probability lies between 0 and 1")
    drafting = shape.num_nextn_predict_layers > 0
    wanted = parse_ks(ks) if ks else (parse_ks("0,1,2,3") if drafting else [0])
    if length is not None and len([k for k in wanted if k]) != 1:
        raise LingError("--accept-length belongs to one draft length: give one --k with it")
    places = [machine(name) for name in machines]
    if measure_here:
        places.append(measure())
    rows = []
    if results is not None:
        rows = _beside_measured(bytes_model, results, places)
    else:
        for place in places or list(MACHINES.values()):
            for k in wanted:
                emitted = accept_length(acceptance, k) if length is None or k == 0 else length
                rows.append(predict(bytes_model, place, k, emitted))
    answer = {
        "model": model,
        "format": shape.fmt,
        "head": stored,
        "parts": [dataclasses.asdict(part) for part in bytes_model.parts()],
        "draft_parts": [dataclasses.asdict(part) for part in bytes_model.draft_parts()] if drafting else [],
        "rows": [row.as_dict() for row in rows],
        "assumptions": _assumptions(acceptance, length, results),
    }
    if as_json:
        print(json.dumps(answer, indent=1))
    else:
        _print_tables(answer, bytes_model, rows, places)


def _beside_measured(model: ByteModel, results: Path, places: list[Machine]) -> list[Row]:
    measured, own = read_results(results)
    if not places and own is None:
        raise LingError(f"{results}: names no known GPU; say which with --machine")
    rows = []
    for place in places or [cast(Machine, own)]:
        for row in measured:
            there = dataclasses.replace(model, context=row.context)
            rows.append(predict(there, place, row.k, row.accept_length, row.ms_per_token))
    return rows


def _assumptions(acceptance: float, length: float | None, results: Path | None) -> list[str]:
    if results is not None:
        drafts = "accept lengths as the measured workloads state them"
    elif length is not None:
        drafts = f"accept length {length}, given"
    else:
        drafts = f"every draft position is accepted with probability {acceptance} if those before it were"
    return [
        "time = bytes / bandwidth: no launches, no sampling, no scheduling; every weight read once per step",
        "tokens of a round choose their experts independently of each other and uniformly",
        drafts,
        "router weights FP32 as vLLM loads them; KDA state read and written once per step; BF16 KV cache",
    ]


def _print_tables(answer: dict[str, Any], model: ByteModel, rows: list[Row], places: list[Machine]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{answer['model']}, {answer['format']}, {answer['head']} head, context {model.context}"
    parts = Table("part", "GB", title=f"Bytes of one decode step: {title}", title_justify="left")
    for part in model.parts():
        parts.add_row(part.name, f"{part.bytes / 1e9:.3f}")
    parts.add_section()
    parts.add_row("total", f"{model.step_bytes() / 1e9:.3f}")
    if answer["draft_parts"]:
        parts.add_row("one draft step", f"{model.draft_bytes() / 1e9:.3f}")
    parts.columns[1].justify = "right"
    console.print(parts)
    headings = ["machine", "k", "accept length", "context", "GB / token", "ms / token", "tok/s"]
    with_measured = any(row.measured_ms_per_token is not None for row in rows)
    headings += ["measured ms", "floor / measured"] if with_measured else []
    table = Table(*headings, title="Predicted time per output token (lower bound)", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [row.machine, str(row.k), f"{row.accept_length:.2f}", str(row.context)]
        cells += [
            f"{row.bytes_per_token / 1e9:.2f}",
            f"{row.ms_per_token:.2f}",
            f"{row.tokens_per_second:.1f}",
        ]
        if with_measured:
            cells += [f"{row.measured_ms_per_token:.2f}", f"{row.share:.0%}"]
        table.add_row(*cells)
    console.print(table)
    for place in places or MACHINES.values():
        console.print(f"{place.name}: {place.bandwidth / 1e9:.0f} GB/s, {place.source}", highlight=False)
    for line in answer["assumptions"]:
        console.print(f"- {line}", highlight=False)
