# SPDX-License-Identifier: Apache-2.0
"""Is a model small enough to hold whole in the project's fp32 reference?"""

from pathlib import Path

from vllm_ling.checkpoint.headers import read_headers

# Beyond this the reference, which is written to be read, takes longer than the rest of the verification.
_MOST_BYTES = 2 * 10**9


def too_large(folder: Path) -> str | None:
    """Why the fp32 reference cannot hold the model, or None. MXFP4 grows eightfold in FP32, which is the bound used."""
    size = sum(info.nbytes for info in read_headers(folder).values())
    room = min(_MOST_BYTES, _available_bytes() // 16)
    if size <= room:
        return None
    return f"{size / 1e9:.1f} GB of weights are too many for the fp32 reference (at most {room / 1e9:.1f} GB here)"


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0
