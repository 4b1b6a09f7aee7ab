# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ling bench decode` asks of an engine, in the engine's own process (see `remote.py`).

Looks (`replays`, `slowest_graph`, `host`, `trace`) are for `remote.during`; the others are for `remote.ask`. A CUDA
graph stays here, and is named by its number, its `id`.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_ling.bench.graphs import back_to_back, counted, longest, timed
from vllm_ling.bench.host import watched
from vllm_ling.bench.processes import die_with_parent
from vllm_ling.bench.trace import steps_of
from vllm_ling.status import STATUS

_GRAPHS: dict[int, Any] = {}


def plugin(worker: Any) -> list[str]:
    """State of the plugin and the reason for it."""
    return [STATUS.state, STATUS.reason]


def tie(worker: Any) -> None:
    """From now on the kernel ends this process when its parent ends, in whichever way."""
    die_with_parent()


def facts(worker: Any) -> dict[str, Any]:
    """`process`: its number; `async_scheduling`: whether vLLM schedules a step ahead; `choices` of the plugin."""
    return {
        "process": os.getpid(),
        "async_scheduling": bool(worker.vllm_config.scheduler_config.async_scheduling),
        "choices": {name: [choice.choice, choice.reason] for name, choice in STATUS.choices.items()},
    }


def weights_bytes(worker: Any) -> int | None:
    """GPU memory that loading took, as vLLM's runner measured it, or None."""
    found = getattr(worker.model_runner, "model_memory_usage", None)
    return None if found is None else int(found)


@contextmanager
def replays() -> Iterator[Callable[[], dict[int, int]]]:
    """Replays by the graph's number."""
    with counted() as counts:
        yield lambda: dict(counts)


@contextmanager
def slowest_graph() -> Iterator[Callable[[], int]]:
    """The number of the model's graph. What it gives raises ValueError where nothing was replayed."""

    def number() -> int:
        graph = longest(seen)
        _GRAPHS[id(graph)] = graph
        return id(graph)

    with timed() as seen:
        yield number


def graph_ms(worker: Any, number: int) -> float:
    """See `graphs.back_to_back`, of a graph that `slowest_graph` found."""
    return back_to_back(_GRAPHS[number])


@contextmanager
def host(number: int) -> Iterator[Callable[[], dict[str, float] | None]]:
    """The fields of `host.Host` with the steps of a graph that `slowest_graph` found.

    None where there were too few of them, or where the engine waits in a way that cannot be watched.
    """

    def seen() -> dict[str, float] | None:
        try:
            return asdict(watch.host(_GRAPHS[number]))
        except ValueError:
            return None

    with watched() as watch:
        yield seen


@contextmanager
def trace() -> Iterator[Callable[[], dict[str, Any]]]:
    """The fields of `trace.Steps`, from torch's profiler. What it gives raises ValueError at too short a trace."""

    def steps() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            return asdict(steps_of(json.loads(path.read_text())["traceEvents"]))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield steps
        torch.cuda.synchronize()
