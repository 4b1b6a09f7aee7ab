# SPDX-License-Identifier: Apache-2.0
"""The result of `vllm-ling bench decode`: how the answers of its engines become rows of one file.

A row is one workload ("plain", "mtp3@2.68") at one context. Fields of the side "ours" have plain names; those of the
others carry the side's name in front (`stock_ms_per_token`). A field that was not measured is null.

- `ms_per_token`: end to end, wall clock, per emitted token, the engine stepped as `LLM.generate` steps it; `spread_ms`
  lowest and highest.
- `engine`: "own process", as with `vllm serve` and `LLM`. Without this field, in results of earlier versions, it shared
  a process and a thread with the front end (requests in, tokens out), and their times added up.
- `graph_ms_per_step`: the model's CUDA graph on the GPU, replayed back to back (CUDA events).
- `gpu_ms_per_step`: all GPU work of a step (with drafts a round): that, and what the trace at the first context shows
  beside it (head, sampling, drafts, copies), without the waits between graph and single launches.
- `host_ms_per_step`: what the thread that steps the engine does (scheduling, attention plans, sampling; no front end
  where the engine has its own process): `busy_ms` of the CPU, of it `launch_ms` for launching CUDA graphs, and
  `wait_ms` for the GPU. Where it hardly waits, the CPU is the limit.
- `launches_per_token`: kernels, copies and memsets per emitted token, from the trace. First context only.
- `dram_bytes_per_token`: read plus written, by ncu, with `--dram`; `dram_note` says how, or why not. Plain decode at
  the first context only.
- `floor_bytes_per_token`: see `floor.py`; `floor_share` is its time at `bandwidth` over `ms_per_token`.
- `accept_length_seen`: tokens per round of the timed answers.

Beside the rows: `extras` (milliseconds of a prefill, of a step of 32 sequences), `kernels` (per engine and context the
40 costliest: name, launches a step, microseconds a step), `engines` (options, start, process and scheduling, memory of
the weights, choices, clocks, notes) and `errors`.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_ling.bench.dram import Traffic
from vllm_ling.bench.floor import floor_bytes
from vllm_ling.bench.side import Answer, Side
from vllm_ling.errors import LingError
from vllm_ling.eval.provenance import provenance, public, public_data
from vllm_ling.roofline.machines import matching_gpu

_NAMES = (
    "ms_per_token",
    "gpu_ms_per_step",
    "launches_per_token",
    "dram_bytes_per_token",
    "floor_bytes_per_token",
)


def new_result(earlier: Path | None) -> dict[str, Any]:
    """An empty result with the origin of this run, or that of `earlier` to go on with (its origin is kept too).

    Raises:
        LingError: `earlier` is no result.
    """
    origin = provenance()
    memory = matching_gpu(origin["gpus"])
    result: dict[str, Any] = {"provenance": origin, "rows": [], "extras": [], "kernels": {}, "engines": {}}
    if earlier is not None and earlier.exists():
        try:
            found = json.loads(earlier.read_text(encoding="utf-8"))
            previous = [*found.get("earlier", []), found["provenance"]]
            result = {name: found[name] for name in result} | {"provenance": origin, "earlier": previous}
        except (ValueError, KeyError, TypeError) as error:
            raise LingError(f"--merge: {earlier} is no result of bench decode ({error!r})") from None
    if memory is not None:
        result |= {"bandwidth": memory.bandwidth, "bandwidth_source": f"{memory.name}: {memory.source}"}
    return result | {"errors": {}}


def add_answer(result: dict[str, Any], name: str, side: Side, answer: Answer) -> None:
    """Puts one engine's figures in, over those of the same engine from an earlier run."""
    label = f"{name} {side.workload}"
    engine = asdict(side) | {
        "start_s": answer.start_s,
        "engine": answer.engine,
        "async_scheduling": answer.async_scheduling,
        "weights_bytes": answer.weights_bytes,
        "choices": answer.choices,
        "clocks": answer.clocks,
        "notes": answer.notes,
        # Which of the file's origins these figures have.
        "date": result["provenance"]["date"],
        "steps": None,
    }
    if answer.steps is not None:
        traced = asdict(answer.steps)
        del traced["kernels"]
        engine["steps"] = traced
    result["engines"][label] = public_data(engine)
    if answer.failed:
        add_failure(result, label, answer.failed)
    steps = answer.steps
    for decoded in answer.decoded:
        first = decoded.context == side.contexts[0]
        values: dict[str, Any] = {
            "ms_per_token": decoded.ms,
            "engine": answer.engine,
            "spread_ms": [decoded.low, decoded.high],
            "graph_ms_per_step": decoded.graph_ms,
            "gpu_ms_per_step": None,
            "floor_bytes_per_token": floor_bytes(side, decoded.context),
        }
        if steps is not None:
            if decoded.graph_ms is not None:
                values["gpu_ms_per_step"] = decoded.graph_ms + steps.gpu_ms - steps.graph_ms
            elif first:
                values["gpu_ms_per_step"] = steps.gpu_ms
            if first:
                values["launches_per_token"] = steps.launches / side.tokens_per_step
                result["kernels"][f"{label} {decoded.context}"] = [list(row) for row in steps.kernels]
        if decoded.host is not None:
            values["host_ms_per_step"] = asdict(decoded.host)
        if decoded.accept_length is not None:
            values["accept_length_seen"] = decoded.accept_length
        if "bandwidth" in result:
            floor_ms = values["floor_bytes_per_token"] / result["bandwidth"] * 1e3
            values["floor_share"] = floor_ms / decoded.ms
        row = _row(result, side.workload, decoded.context)
        _forget(row, name)
        _put(row, name, values)
    for extra in answer.extras:
        row = _named(result["extras"], workload=extra.workload)
        values = {"ms": extra.ms, "spread_ms": [extra.low, extra.high], "engine": answer.engine}
        _put(row, name, values)


def add_traffic(result: dict[str, Any], name: str, side: Side, traffic: Traffic) -> None:
    """Puts DRAM counters into the row of the side's first context."""
    values: dict[str, Any] = {"dram_bytes_per_token": traffic.total, "dram_note": public(traffic.note)}
    if traffic.total is not None:
        values |= {"dram_read_bytes": traffic.read, "dram_written_bytes": traffic.written}
    _put(_row(result, side.workload, side.contexts[0]), name, values)


def add_failure(result: dict[str, Any], label: str, why: str) -> None:
    """Records why an engine gave no or not all figures."""
    result["errors"][label] = public(why)


def _forget(row: dict[str, Any], name: str) -> None:
    """Empties the side's fields: nothing of an earlier run may stand beside figures of this one."""
    for field in row.keys() - {"workload", "context"}:
        other = re.match(r"(stock|ours\d+)_", field)
        if name == (other[1] if other else "ours"):
            row[field] = None


def _row(result: dict[str, Any], workload: str, context: int) -> dict[str, Any]:
    row = _named(result["rows"], workload=workload, context=context)
    for field in _NAMES:
        row.setdefault(field, None)
    return row


def _named(rows: list[dict[str, Any]], **key: Any) -> dict[str, Any]:
    """The row with these values, made if there is none."""
    for row in rows:
        if all(row[name] == value for name, value in key.items()):
            return row
    rows.append(dict(key))
    return rows[-1]


def _put(row: dict[str, Any], name: str, values: dict[str, Any]) -> None:
    prefix = "" if name == "ours" else f"{name}_"
    row |= {f"{prefix}{field}": value for field, value in values.items()}
