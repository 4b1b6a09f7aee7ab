# SPDX-License-Identifier: Apache-2.0
"""Rows of predicted time per output token, and measured rows beside them."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.roofline.bytes import ByteModel
from vllm_ling.roofline.machines import Machine, matching_gpu


@dataclass(frozen=True)
class Row:
    """One prediction: a lower bound of the time per output token (TPOT) from bytes over bandwidth."""

    machine: str
    k: int
    accept_length: float
    context: int
    bytes_per_token: float
    ms_per_token: float
    measured_ms_per_token: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of the decode speed of one sequence."""
        return 1e3 / self.ms_per_token

    @property
    def share(self) -> float | None:
        """Predicted over measured time: the part of the measured time that the bytes explain."""
        return None if self.measured_ms_per_token is None else self.ms_per_token / self.measured_ms_per_token

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; the measured fields only where there is a measurement."""
        row: dict[str, Any] = {
            "machine": self.machine,
            "k": self.k,
            "accept_length": round(self.accept_length, 4),
            "context": self.context,
            "bytes_per_token": round(self.bytes_per_token),
            "ms_per_token": round(self.ms_per_token, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
        if self.measured_ms_per_token is not None:
            row |= {
                "measured_ms_per_token": self.measured_ms_per_token,
                "share_of_floor": round(self.share or 0, 4),
            }
        return row


def predict(
    model: ByteModel, machine: Machine, k: int, accept_length: float, measured: float | None = None
) -> Row:
    """The row of one machine and draft length; `measured` in ms per token."""
    traffic = model.bytes_per_token(k, accept_length)
    return Row(
        machine.name, k, accept_length, model.context, traffic, machine.milliseconds(traffic), measured
    )


@dataclass(frozen=True)
class Measured:
    """One row of a decode benchmark's result file; `ms_per_token` end to end."""

    k: int
    accept_length: float
    context: int
    ms_per_token: float


def read_results(path: Path) -> tuple[list[Measured], Machine | None]:
    """Measured rows of a decode result file (`workload` is `plain` or `mtpK@L`), and the machine its provenance names.

    Raises:
        LingError: the file is missing, no JSON or holds no such rows.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            Measured(*_workload(row["workload"]), int(row["context"]), float(row["ms_per_token"]))
            for row in found["rows"]
            if row["ms_per_token"] is not None  # an engine that failed
        ]
    except OSError as error:
        raise LingError(f"{path}: cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise LingError(f"{path}: not a decode result file ({type(error).__name__}: {error})") from None
    gpus = (found.get("provenance") or {}).get("gpus") or []
    return rows, matching_gpu(gpus)


def _workload(name: str) -> tuple[int, float]:
    if name == "plain":
        return 0, 1.0
    match = re.fullmatch(r"mtp(\d+)@(\d+(?:\.\d+)?)", name)
    if match is None:
        raise ValueError(f"unknown workload {name!r}")
    return int(match[1]), float(match[2])


def parse_ks(text: str) -> Sequence[int]:
    """Draft lengths from a comma-separated list."""
    try:
        ks = [int(word) for word in text.split(",")]
    except ValueError:
        raise LingError(f"--k {text}: expected draft lengths separated by commas, such as 0,1,2,3") from None
    if not all(0 <= k <= 7 for k in ks):
        raise LingError(f"--k {text}: draft lengths lie between 0 and 7")
    return ks
