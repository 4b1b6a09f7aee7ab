# SPDX-License-Identifier: Apache-2.0
"""A profiler's trace of decoding -> what one step runs on the GPU: launches, time, kernels by name.

A step goes from the start of the model's CUDA graph to its next start, so it holds everything between: head, sampling,
drafts, copies. The trace is the chrome form that torch.profiler exports (times in microseconds); CUPTI lists every
kernel of a graph launch under the correlation number of that launch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_NAME = 90
_SETTLE = 2  # steps at the start that are left out
TOP = 40


@dataclass(frozen=True)
class Steps:
    """Averages over `steps` traced steps. Tracing itself stretches graphs of many small kernels a little.

    Attributes:
        launches: kernels, copies and memsets a step.
        gpu_ms: milliseconds that the GPU works for a step: every CUDA graph from its first start to its last end, gaps
            inside included, and everything launched singly; the waits between them left out.
        graph_ms: the part of `gpu_ms` that is the model's own graph.
        kernel_ms: the sum over `kernels` and those not listed: `gpu_ms` less the gaps inside graphs.
        period_ms: from one step's start to the next one's, CPU included, under the profiler.
        kernels: (name, count a step, microseconds a step), most expensive first. A kernel is charged from the end of
            those before it, as one that is launched early spends the time before that waiting for them.
    """

    steps: int
    launches: float
    gpu_ms: float
    graph_ms: float
    kernel_ms: float
    period_ms: float
    kernels: list[tuple[str, float, float]]


def read_steps(found: dict[str, Any]) -> Steps:
    """The steps from their plain form, which has lists for tuples."""
    return Steps(**found | {"kernels": [tuple(row) for row in found["kernels"]]})


@dataclass(frozen=True)
class _Event:
    name: str
    start: float
    end: float
    group: int


def steps_of(trace: Iterable[Mapping[str, Any]]) -> Steps:
    """What a step runs, from the trace's events.

    Raises:
        ValueError: the trace holds no two whole steps.
    """
    events, launched = [], set()
    for record in trace:
        correlation = int(record.get("args", {}).get("correlation", -1))
        if record.get("cat") in _ON_GPU and record.get("ph") == "X":
            start = float(record["ts"])
            events.append(_Event(str(record["name"]), start, start + float(record["dur"]), correlation))
        elif "GraphLaunch" in str(record.get("name", "")):
            launched.add(correlation)
    events.sort(key=lambda event: event.start)
    groups: dict[int, list[_Event]] = defaultdict(list)
    for event in events:
        groups[event.group].append(event)
    # A launch of one kernel yields one event: several under one number are a graph, its launch listed or not.
    groups = {n: group for n, group in groups.items() if n in launched or (n >= 0 and len(group) > 1)}
    busy = {number: sum(e.end - e.start for e in group) for number, group in groups.items()}
    # Draft steps replay graphs too; they are a small part of the model's.
    models = [number for number in groups if busy[number] >= 0.5 * max(busy.values())]
    starts = sorted(groups[number][0].start for number in models)[_SETTLE:]
    if len(starts) < 3:
        raise ValueError(f"{len(events)} GPU events, {len(launched)} graph launches, too few whole steps")
    begin, end, count = starts[0], starts[-1], len(starts) - 1
    spans = {number: (group[0].start, max(e.end for e in group)) for number, group in groups.items()}
    inside = [event for event in events if begin <= event.start < end]
    whole = [spans.get(event.group, (event.start, event.end)) for event in inside]
    own = [spans[number] for number in models if begin <= spans[number][0] < end]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    reached = begin
    for event in inside:
        total = totals[short_name(event.name)]
        total[0] += 1
        total[1] += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    rows = [(name, n / count, us / count) for name, (n, us) in totals.items()]
    return Steps(
        steps=count,
        launches=len(inside) / count,
        gpu_ms=_covered(whole) / count / 1e3,
        graph_ms=_covered(own) / count / 1e3,
        kernel_ms=sum(us for _, _, us in rows) / 1e3,
        period_ms=(end - begin) / count / 1e3,
        kernels=sorted(rows, key=lambda row: -row[2])[:TOP],
    )


def short_name(name: str) -> str:
    """A kernel's name without return type and parameter list, cut to a readable length."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for at, letter in enumerate(name):
        if letter in "<>":
            depth += 1 if letter == "<" else -1
        elif letter == "(" and depth == 0:
            name = name[:at]
            break
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
