# SPDX-License-Identifier: Apache-2.0
"""Runs one part of a study in a process of its own: an engine gives its GPU memory back, and stock stays stock."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError


def run_child(module: str, spec: dict[str, Any], out: Path, *, stock: bool, timeout_s: float) -> float:
    """Runs `python -m module SPEC OUT` with the plugin on or off; returns the seconds it took.

    Raises:
        LingError: it failed, took longer than `timeout_s` or wrote nothing; with the end of its log.
    """
    env = os.environ | {"VLLM_LING_DISABLE": "1" if stock else "0"}
    log = out.with_suffix(".log")
    began = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [sys.executable, "-m", module, json.dumps(spec), str(out)],
                env=env,
                stdout=output,
                stderr=output,
                check=False,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise LingError(f"{module} took longer than {timeout_s:.0f} s: {_end(log)}") from None
    if code or not out.exists():
        raise LingError(f"{module} failed ({code}): {_end(log)}")
    return time.monotonic() - began


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
