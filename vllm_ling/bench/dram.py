# SPDX-License-Identifier: Apache-2.0
"""DRAM bytes of one launch or of one decode step, by the hardware counters of Nsight Compute (`ncu`).

Also the programs that ncu watches: `python -m vllm_ling.bench.dram` and `... dram step SIDE_AS_JSON`.
"""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_ling.bench.processes import run_limited
from vllm_ling.bench.side import Side

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
# A small engine starts within a minute even under ncu; its layers hold whole groups (5 KDA + 1 MLA of flash).
_FEW, _MORE = 6, 12
_FIRST, _STEPS = 4, 2
_COMMON = ("--clock-control", "none", "--csv", "--print-units", "base")


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written per decode step, and how they were found; None with the reason in `note`."""

    read: float | None
    written: float | None
    note: str

    @property
    def total(self) -> float | None:
        """Read plus written."""
        return None if self.read is None or self.written is None else self.read + self.written


def moe_block_bytes() -> int | None:
    """Bytes that one MoE block launch of one token reads, caches flushed before; None if no counter can be read."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return None
    command = [ncu, *_COMMON, "--metrics", READ]
    command += ["-k", "moe_block", "-s", "2", "-c", "1", sys.executable, "-m", "vllm_ling.bench.dram"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    found = counters(done.stdout).get(READ)
    return int(found[0]) if found else None


def step_traffic(side: Side, timeout_s: float = 150, run: Callable[..., int | None] = run_limited) -> Traffic:
    """DRAM traffic of one plain decode step of `side` at its first context. Never raises.

    ncu watches two steps of an engine of 6 layers, then of 12: every CUDA graph as one unit (one pass reads both
    counters, so nothing is saved and replayed) and every launch beside it, L2 flushed before each; copies and memsets
    outside graphs are not seen. The difference is what 6 layers cost; the side's own number of layers follows from it.
    Where ncu cannot take a graph as one, it takes every kernel of it. `timeout_s` is for everything together.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        return Traffic(None, None, "ncu is not on the PATH")
    deadline = time.monotonic() + timeout_s
    sizes = [side.layers] if side.layers <= _MORE else [_FEW, _MORE]
    reasons = []
    for unit in ("graph", "node"):
        try:
            found = [
                _step(ncu, unit, replace(side, layers=n), deadline - time.monotonic(), run) for n in sizes
            ]
        except Exception as error:
            reasons.append(f"by {unit}: {type(error).__name__}: {error}")
            continue
        reads, writes = ([entry[metric] for entry in found] for metric in (READ, WRITE))
        how = f"ncu by {unit}, {_STEPS} steps of engines of {' and '.join(map(str, sizes))} layers"
        if len(sizes) == 1:
            return Traffic(reads[0], writes[0], how)
        return Traffic(_extend(reads, side.layers), _extend(writes, side.layers), how + ", extrapolated")
    return Traffic(None, None, "; ".join(reasons))


def _extend(measured: list[float], layers: int) -> float:
    few, more = measured
    return few + (more - few) * (layers - _FEW) / (_MORE - _FEW)


def _step(
    ncu: str, unit: str, side: Side, timeout_s: float, run: Callable[..., int | None]
) -> dict[str, float]:
    if timeout_s <= 0:
        raise TimeoutError("no time left")
    command = [ncu, *_COMMON, "--metrics", f"{READ},{WRITE}", "--graph-profiling", unit]
    command += ["--profile-from-start", "off", "--target-processes", "application-only"]
    command += [sys.executable, "-m", "vllm_ling.bench.dram", "step", json.dumps(asdict(side))]
    env = os.environ | {"VLLM_LING_DISABLE": "1" if side.options is None else "0"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        code = run(command, env, log, timeout_s)
        text = log.read_text(encoding="utf-8", errors="replace")
    what = f"{side.layers} layers: ncu " + ("ran out of time" if code is None else f"ended with {code}")
    found = counters(text)
    if code != 0 or not {READ, WRITE} <= found.keys():
        # ncu's own words may be far above the end of the engine's log.
        said = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
        tail = "\n".join([*said[:10], text[-1000:]])
        raise RuntimeError(f"{what}, counters of {sorted(found) or 'nothing'}: {tail}")
    return {metric: total / _STEPS for metric, (total, _) in found.items()}


def counters(text: str) -> dict[str, tuple[float, int]]:
    """Per metric the sum over all launches and their number, from ncu's CSV with anything else between.

    A metric with a value that is no number is left out: a sum with holes would look like little traffic.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, tuple[float, int]] = {}
    broken = set()
    for entry in csv.DictReader(io.StringIO("\n".join(lines))):
        metric, value = entry.get("Metric Name"), entry.get("Metric Value")
        if not metric:
            continue
        total, count = found.get(metric, (0.0, 0))
        try:
            found[metric] = (total + float((value or "").replace(",", "")), count + 1)
        except ValueError:
            broken.add(metric)
    return {metric: entry for metric, entry in found.items() if metric not in broken}


def _launch() -> None:
    import torch

    from vllm_ling.bench.layers import FLASH, random_moe_layer
    from vllm_ling.quant.decode_moe import MoEDecoder
    from vllm_ling.quant.jit import default_cache, gpu_of

    device = torch.device("cuda")
    w = random_moe_layer(FLASH, device)
    x = torch.randn(1, FLASH.hidden, device=device, dtype=torch.float32).bfloat16()
    decoder = MoEDecoder(FLASH, gpu_of(device), device, default_cache())
    for _ in range(3):
        decoder(x, w, torch.empty_like(x), 2.5, 0.0, 0.0)
    torch.cuda.synchronize()


def _steps(side: Side) -> None:
    """Decodes with the profiler switched on from the start of one step's graph to the start of a later one's."""
    import torch

    from vllm_ling.bench.graphs import model_graph, on_replay
    from vllm_ling.bench.worker import engine, generate

    # In this process, the one that ncu watches; what the GPU reads for a step does not depend on it.
    llm, _ = engine(side, memory=0.4, own_process=False)
    context, tokens = side.contexts[0], _FIRST + _STEPS + 6
    graph = model_graph(lambda: generate(llm, context, tokens))
    seen = 0

    def act(replayed: Any, replay: Callable[[], None]) -> None:
        nonlocal seen
        if replayed is graph:
            if seen in (_FIRST, _FIRST + _STEPS):
                torch.cuda.synchronize()
                (torch.cuda.profiler.start if seen == _FIRST else torch.cuda.profiler.stop)()
            seen += 1
        replay()

    with on_replay(act):
        generate(llm, context, tokens)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        _steps(Side(**json.loads(sys.argv[2])))
    else:
        _launch()
