# SPDX-License-Identifier: Apache-2.0
"""What a fault is, and the ways to damage evidence that several faults share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.doctor.evidence import (
    CONFIG,
    GPU_RECORD,
    LIVE,
    LOG,
    STATIC,
    WORDS,
    Evidence,
    but,
    config,
    lines,
    live,
    without,
)
from tests.unit.checkpoint_files import Tensors

# What takes away the evidence of a check, by kind of source.
NO_LOG = but(LOG, log="nothing that a server would say\n", config=None)
NO_CHECKPOINT = but(STATIC, config=None)
IDLE = live(LIVE, traffic=dict.fromkeys(LIVE.live.traffic, 0.0) if LIVE.live else {})
ODD_VERSION = lines(LOG, (r"\(v0\.33\.0\)", "(v0.41.0)"))
NO_OWN_SERIES = live(LIVE, record=None)


@dataclass(frozen=True)
class Fault:
    """One injected fault; `cause` is a piece of the evidence or the fix that doctor must give."""

    name: str
    check: str
    outcome: str
    cause: str
    bad: Evidence
    ok: Evidence = LOG
    missing: Evidence = NO_LOG


def drop(*parts: str) -> Any:
    """Removes tensors whose name contains a part."""

    def apply(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return apply


def store(name: str, dtype: str, *shape: int) -> Any:
    """Stores a tensor in another dtype, or adds it."""
    return lambda tensors: tensors.update({name: (dtype, shape or tensors[name][1])})


def fp8_head(scale: bool) -> Any:
    """An FP8 head, with or without its row scale."""

    def apply(tensors: Tensors) -> None:
        rows, columns = tensors["lm_head.weight"][1]
        tensors["lm_head.weight"] = ("F8_E4M3", (rows, columns))
        if scale:
            tensors["lm_head.weight_scale"] = ("F32", (rows,))

    return apply


def truncated(folder: Path) -> None:
    """Half a shard."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)


def huge_header(folder: Path) -> None:
    """A header that claims 2^63 bytes."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    with shard.open("r+b") as file:
        file.write((1 << 63).to_bytes(8, "little"))


def ling(**options: Any) -> tuple[str, str]:
    """An edit that puts ling options into the log's arguments."""
    return r"'speculative_config'", f"'additional_config': {{'ling': {options!r}}}, 'speculative_config'"


# An edit that takes the ling options out of the log's arguments.
DEFAULTS = (r", 'additional_config': \{'ling': .*?\}\}", "")


def record(**changes: Any) -> Evidence:
    """A live server whose engine recorded something else."""
    return live(LIVE, record={**GPU_RECORD, **changes})


def words(*more: str, leave: str = "") -> tuple[str, ...]:
    """The serve flags with some added, and one with its value left out."""
    kept = list(WORDS)
    if leave:
        index = kept.index(leave)
        del kept[index : index + 2]
    return (*kept, *more)


def excluding(*modules: str) -> dict[str, Any]:
    """config.json with other exclusions."""
    return config(
        quantization_config={**CONFIG["quantization_config"], "modules_to_not_convert": list(modules)}
    )


EXCLUDED = CONFIG["quantization_config"]["modules_to_not_convert"]
BARE_LOG = without(LOG, "vllm-ling: ")
STOCK_FP8_HEAD = but(BARE_LOG, tensors=fp8_head(True))
LITTLE = {name: 5.0 for name in ("vllm:spec_decode_num_drafts_total",)}


def accepted(*per_position: float, **more: float) -> Evidence:
    """A live server that made 200 drafts, with these acceptances per position."""
    position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%d"}'
    traffic: dict[str, float] = {position % n: 200 * rate for n, rate in enumerate(per_position)}
    traffic["vllm:spec_decode_num_accepted_tokens_total"] = 200 * sum(per_position)
    return live(LIVE, traffic={**traffic, **more})


LENGTH_STOP = 'vllm:request_success_total{finished_reason="stop"}'
LENGTH_LIMIT = 'vllm:request_success_total{finished_reason="length"}'
