# SPDX-License-Identifier: Apache-2.0
"""Are the bytes of the checkpoint the right ones? Digests, scales that stand out, and another source beside them.

Comparing two computations on the same bytes cannot answer this: a flipped byte is flipped on both sides. A digest sees
every change; another source sees what exceeds its own rounding; the scales alone see only a factor, not a flipped sign.
"""

import hashlib
import re
from pathlib import Path
from statistics import median

import torch

from vllm_ling.checkpoint.headers import read_headers
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.finding import Outcome
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.load import StoredTensors

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Experts of one layer differ in size by small factors; a scale that is off by whole exponents does not.
_STANDS_OUT = 16.0
# Relative RMS that rounding leaves in a matrix: 0.12 in MXFP4 and 0.09 in INT4 of 32, 0.03 in block FP8. Two thirds
# more leave room for heavy tails; wrong scales or flipped bytes of a whole tensor give 0.5 and more.
_ROUNDING = {"fp4": 0.2, "int4": 0.15, "fp8": 0.05, "bf16": 0.0}
_CHUNK = 2**24


def check_digests(files: set[Path]) -> tuple[list[tuple[Outcome, str]], list[str]]:
    """(problems, what was seen) of files whose download names the SHA-256 that they must have."""
    problems: list[tuple[Outcome, str]] = []
    known = 0
    for path in sorted(files):
        expected = path.resolve().name
        if not re.fullmatch(r"[0-9a-f]{64}", expected):
            continue
        known += 1
        found = _sha256(path)
        if found != expected:
            problems.append(
                ("fail", f"{path.name}: SHA-256 {found[:12]}... where the hub has {expected[:12]}...")
            )
    if not known:
        return [], ["no digests known (a hub download has them)"]
    return problems, [f"{known - len(problems)} of {len(files)} shards read have the digest of the hub"]


def files_of(folder: Path, prefix: str) -> set[Path]:
    """Files that hold the tensors whose names begin with `prefix`."""
    return {folder / info.file for name, info in read_headers(folder).items() if name.startswith(prefix)}


def check_scales(
    stored: StoredTensors, shape: LingShape, layer: int
) -> tuple[list[tuple[Outcome, str]], dict[str, float]]:
    """Experts whose scales are far from those of the layer's others; largest and smallest ratio to the median."""
    suffix = {"fp4": "weight_scale_inv", "fp8": "weight_scale_inv", "int4": "weight_scale"}.get(shape.fmt)
    if suffix is None:
        return [], {}
    problems: list[tuple[Outcome, str]] = []
    ratios = [1.0]
    for projection in PROJECTIONS:
        sizes = {}
        for expert in range(shape.num_experts):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{suffix}"
            sizes[name] = float(_as_float(stored.read(name)).abs().max())
        middle = median(sizes.values())
        for name, size in sizes.items():
            ratio = size / middle if middle else float("inf")
            ratios.append(ratio)
            if not 1 / _STANDS_OUT <= ratio <= _STANDS_OUT:
                problems.append(("warn", f"{name}: largest scale {ratio:.3g} times the layer's median"))
    return problems, {"largest": max(ratios), "smallest": min(ratios)}


def check_other_source(
    stored: StoredTensors,
    other: StoredTensors,
    formats: tuple[str, str],
    config: ReferenceConfig,
    layer: int,
    experts: list[int],
) -> tuple[list[tuple[Outcome, str]], float]:
    """Matrices of some experts and of the shared expert against another source; the worst relative RMS.

    Args:
        formats: of the checkpoint and of the other source; the same format must hold the same values.
    """
    bound = 0.0 if formats[0] == formats[1] else sum(_ROUNDING[fmt] for fmt in formats)
    prefix = f"model.layers.{layer}.mlp"
    modules = [f"{prefix}.experts.{expert}" for expert in experts] + [f"{prefix}.shared_experts"]
    problems: list[tuple[Outcome, str]] = []
    worst = 0.0
    for module in modules:
        for projection in PROJECTIONS:
            name = f"{module}.{projection}.weight"
            away = relative_rms(stored.weight(name), other.weight(name))
            worst = max(worst, away)
            if not away <= bound:
                problems.append(
                    (
                        "fail",
                        f"{name}: {away:.3g} (relative RMS) from --reference, at most {bound:g} expected",
                    )
                )
    return problems, worst


def relative_rms(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS(ours - exact) / RMS(exact); NaN and infinity stay, and are beyond every bound."""
    ours, exact = ours.double(), exact.double()
    return float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300))


def _as_float(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
