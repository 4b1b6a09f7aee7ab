# SPDX-License-Identifier: Apache-2.0
"""The worker of `bench decode` on the CPU, with what the looks need of a GPU played inside the engine's process.

    python -m tests.cpu.engine_in_own_process SIDE_AS_JSON ANSWER_FILE

Every decode step replays a "graph" of 2 ms and waits 1 ms for an "event"; the profiler has a trace of 8 steps.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_ling.bench import engine as bench_engine
from vllm_ling.bench import worker as bench_worker
from vllm_ling.bench.processes import tie_children
from vllm_ling.bench.remote import ask
from vllm_ling.bench.side import Side
from vllm_ling.eval.files import write_json


def play(worker: Any) -> None:
    """Sent by value, as it lies in the main module: what it makes is the engine's alone."""
    import time

    import torch

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * float(end.at - self.at)

        def synchronize(self) -> None:
            time.sleep(0.001)

    class Graph(torch.cuda.CUDAGraph):
        def __new__(cls) -> Any:
            return object.__new__(cls)

        def __init__(self) -> None:
            pass

    class Profile:
        def __init__(self, activities: Any) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            pass

        def export_chrome_trace(self, path: str) -> None:
            events = [
                {"ph": "X", "cat": "kernel", "name": name, "ts": 1000.0 * step + at, "dur": us}
                | {"args": {"correlation": 10 * step + number}}
                for step in range(8)
                for name, at, us, number in (("moe", 0, 100, 1), ("moe", 100, 100, 1), ("head", 300, 50, 2))
            ]
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": events}, file)

    graph, event, execute = Graph(), Event(), worker.worker.execute_model

    def step(scheduled: Any) -> Any:
        if 0 < scheduled.total_num_scheduled_tokens <= 4:
            graph.replay()
            torch.cuda.Event.synchronize(event)  # type: ignore[arg-type]
        return execute(scheduled)

    torch.cuda.CUDAGraph.replay = lambda graph: time.sleep(0.002)  # type: ignore[method-assign,assignment]
    torch.cuda.Event = Event  # type: ignore[misc,assignment]
    torch.cuda.synchronize = lambda *_: None
    torch.profiler.profile = Profile  # type: ignore[misc,assignment]
    worker.worker.execute_model = step


if __name__ == "__main__":
    start = bench_engine.start

    def start_and_play(*args: Any, **settings: Any) -> Any:
        # Synthetic acceptance is for GPUs; random weights accept next to nothing.
        for name in ("rejection_sample_method", "synthetic_acceptance_length"):
            settings.get("speculative_config", {}).pop(name, None)
        llm = start(*args, **settings)
        ask(llm, play)
        return llm

    bench_engine.start = start_and_play
    tie_children()
    bench_worker.work(
        Side(**json.loads(sys.argv[1])), lambda answer: write_json(Path(sys.argv[2]), asdict(answer))
    )
