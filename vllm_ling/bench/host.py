# SPDX-License-Identifier: Apache-2.0
"""What the CPU does in a step: work of its own, launching CUDA graphs, and waiting for the GPU.

All of the process that this runs in, the engine's: where that is not the caller's, no front end is in it. A step that
takes longer than the GPU's part of it, with little waiting, is limited by the CPU. Torch's own `replay` and
`torch.cuda.Event.synchronize` are wrapped for the time of a measurement, so no vLLM internal is touched. The V2 runner
waits on those events. The V1 runner, unless it schedules ahead, waits on a `torch.Event`, a C type that cannot be
wrapped: of an engine in which no wait was seen nothing is claimed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ling.bench.graphs import on_replay

_SETTLED = 16  # steps before those that count


@dataclass(frozen=True)
class Host:
    """Milliseconds a step: the CPU's own work (`launch_ms` included), launching graphs, waiting for events."""

    busy_ms: float
    launch_ms: float
    wait_ms: float


@dataclass
class Watch:
    """Spans (begin, end) in seconds: graph launches by the graph's `id`, and waits."""

    launches: list[tuple[int, float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def host(self, graph: Any) -> Host:
        """The average step, from one launch of `graph` to its next one.

        Raises:
            ValueError: fewer than two whole steps were seen, or no wait in them, which no engine can do without.
        """
        starts = [begin for number, begin, _ in self.launches if number == id(graph)][_SETTLED:]
        if len(starts) < 3:
            raise ValueError(f"{len(starts)} launches of the model's graph are too few")
        begin, end, steps = starts[0], starts[-1], len(starts) - 1

        def total(spans: list[tuple[float, float]]) -> float:
            return sum(stop - start for start, stop in spans if begin <= start < end)

        waited = total(self.waits)
        if not any(begin <= start < end for start, _ in self.waits):
            raise ValueError("no wait for the GPU was seen: the engine waits in a way that is not watched")
        launched = total([(start, stop) for _, start, stop in self.launches])
        per_step = 1e3 / steps
        return Host((end - begin - waited) * per_step, launched * per_step, waited * per_step)


@contextmanager
def watched() -> Iterator[Watch]:
    """Inside, graph launches and waits of this process are recorded, a microsecond or so each."""
    watch = Watch()
    synchronize = torch.cuda.Event.synchronize

    def act(graph: Any, replay: Callable[[], None]) -> None:
        begin = time.perf_counter()
        replay()
        watch.launches.append((id(graph), begin, time.perf_counter()))

    def wait(event: Any) -> None:
        begin = time.perf_counter()
        synchronize(event)
        watch.waits.append((begin, time.perf_counter()))

    torch.cuda.Event.synchronize = wait  # type: ignore[method-assign,assignment]
    try:
        with on_replay(act):
            yield watch
    finally:
        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
