# SPDX-License-Identifier: Apache-2.0
"""Runs one part of a study in a process of its own: an engine gives its GPU memory back, and stock stays stock."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_ling.bench.processes import run_limited
from vllm_ling.errors import LingError

# DeepGEMM compiles a kernel for every number of prompt tokens that it meets, minutes of them on a fresh machine.
# Studies compare results, not times, so they take Triton's block-FP8 GEMM and none that vLLM would try before it: on an
# H200, CUTLASS and Humming refuse the MLA projection's 576 rows, no whole scale blocks, when nothing else can step in.
SETTINGS = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DISABLED_KERNELS": "CutlassFp8BlockScaledMMKernel,B12xFp8BlockScaledMMKernel,"
    "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel",
}


def run_child(module: str, spec: dict[str, Any], out: Path, *, stock: bool, timeout_s: float) -> float:
    """Runs `python -m module SPEC OUT` with the plugin on or off; returns the seconds it took.

    Says every 20 seconds what its log said last.

    Raises:
        LingError: it failed, took longer than `timeout_s` or wrote nothing; with the end of its log.
    """
    env = SETTINGS | os.environ | {"VLLM_LING_DISABLE": "1" if stock else "0"}
    log = out.with_suffix(".log")
    began = time.monotonic()

    def news(seconds: float) -> None:
        last = (_end(log).strip().splitlines() or ["nothing yet"])[-1]
        print(f"    {seconds:.0f} s: {last[-160:]}", flush=True)

    code = run_limited([sys.executable, "-m", module, json.dumps(spec), str(out)], env, log, timeout_s, news)
    if code is None:
        raise LingError(f"{module} took longer than {timeout_s:.0f} s: {_end(log)}")
    if code or not out.exists():
        raise LingError(f"{module} failed ({code}): {_end(log)}")
    return time.monotonic() - began


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
