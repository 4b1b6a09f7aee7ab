# SPDX-License-Identifier: Apache-2.0
"""Watches the CUDA graphs that a running engine replays, and times one of them without the CPU.

Torch's own `replay` is wrapped for the time of a measurement, so no vLLM internal is touched.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

# By the graph's `id`: the graph, and the events before and after each of its replays.
Timed = dict[int, tuple[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]]]


@contextmanager
def on_replay(act: Callable[[Any, Callable[[], None]], None]) -> Iterator[None]:
    """Inside, every replay of a graph calls `act(graph, replay)`, which has to call `replay()`."""
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        act(graph, lambda: original(graph))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


@contextmanager
def counted() -> Iterator[dict[int, int]]:
    """Counts replays by the graph's `id`; costs well under a microsecond each."""
    counts: dict[int, int] = defaultdict(int)

    def act(graph: Any, replay: Callable[[], None]) -> None:
        counts[id(graph)] += 1
        replay()

    with on_replay(act):
        yield counts


@contextmanager
def timed() -> Iterator[Timed]:
    """Every replay inside, between two CUDA events; ask `longest` about them."""
    seen: Timed = {}

    def act(graph: Any, replay: Callable[[], None]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        seen.setdefault(id(graph), (graph, []))[1].append((begin, end))

    with on_replay(act):
        yield seen


def longest(seen: Timed) -> Any:
    """The graph that takes longest among those that were replayed: the model's, not a draft step's.

    Raises:
        ValueError: nothing was replayed.
    """
    if not seen:
        raise ValueError("no CUDA graph was replayed")
    torch.cuda.synchronize()

    def milliseconds(entry: tuple[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]]) -> float:
        return median(begin.elapsed_time(end) for begin, end in entry[1])

    return max(seen.values(), key=milliseconds)[0]


def model_graph(generate: Callable[[], object]) -> Any:
    """The graph that takes longest among those that `generate()` replays in this process; see `longest`."""
    with timed() as seen:
        generate()
    return longest(seen)


def back_to_back(graph: Any, replays: int = 20, rounds: int = 5) -> float:
    """Milliseconds of one replay: median over `rounds` of the time of `replays` in a row, with the inputs of the last
    step. The GPU never waits for the CPU between them, so this is graph to graph.
    """
    times = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # hides the launch of the first one that counts
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / replays)
    return float(median(times[1:]))
