# SPDX-License-Identifier: Apache-2.0
"""Times a sequence of launches as one CUDA graph, so that neither Python nor the L2 cache flatters the figure."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over the replays, and the whole range."""

    us: float
    low: float
    high: float


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One side stream per device: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has seen."""
    return torch.cuda.Stream(device)


def time_graph(calls: Sequence[Callable[[], object]], rounds: int = 4, replays: int = 11) -> Timing:
    """Times `calls` (one per layer; together larger than the L2 cache), each run `rounds` times in a graph.

    The graph is replayed `replays` times after warm-ups of at least 0.2 s: clocks rise under load, and 20 ms after an
    idle spell left the first figure 10% too high. Every figure is a replay's time over its number of calls.
    """
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        warm = time.monotonic() + 0.2
        while time.monotonic() < warm:
            graph.replay()
            stream.synchronize()
        for begin, end in events:
            begin.record(stream)
            graph.replay()
            end.record(stream)
        stream.synchronize()
    times = [begin.elapsed_time(end) * 1e3 / (rounds * len(calls)) for begin, end in events]
    return Timing(median(times), min(times), max(times))
