# SPDX-License-Identifier: Apache-2.0
"""Compares a checkpoint's headers with what its config declares, before any weight is read."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_ling.checkpoint.headers import TensorInfo, read_headers
from vllm_ling.checkpoint.shapes import Format, LingShape
from vllm_ling.checkpoint.tensors import FP8, SCALE, TensorSpec, expected_tensors
from vllm_ling.errors import LingError

HeadScale = Literal["none", "row", "block"]


@dataclass(frozen=True)
class CheckpointFacts:
    """What the headers say about a sound checkpoint."""

    fmt: Format
    shape: LingShape
    has_mtp: bool
    head_scale: HeadScale
    n_tensors: int
    total_bytes: int
    bytes_by_role: dict[str, int]


def validate_checkpoint(folder: Path) -> CheckpointFacts:
    """Checks names, shapes, dtypes and completeness of a Ling checkpoint; reads headers only.

    Raises:
        LingError: the first problem, naming the tensor, file or config key, and how many there are.
    """
    shape = LingShape.from_folder(folder)
    headers = read_headers(folder)
    expected = expected_tensors(shape)
    head_scale = _allow_fp8_head(shape, headers, expected)
    has_mtp = _forget_absent_mtp(shape, headers, expected)

    problems = _expert_count(shape, headers)
    problems += [f"{name}: missing from the checkpoint" for name in expected if name not in headers]
    wrong_dtype: list[str] = []
    for name, info in headers.items():
        spec = expected.get(name)
        if spec is None:
            problems.append(f"{name} ({info.file}): not part of a Ling {shape.fmt} checkpoint of this config")
        elif info.shape != spec.shape:
            problems.append(f"{name} ({info.file}): shape {list(info.shape)}, expected {list(spec.shape)}")
        elif info.dtype not in spec.dtypes:
            wrong_dtype.append(name)
    if wrong_dtype:
        idle = _idle_exclusions(shape, headers)
        problems += [_dtype_problem(name, headers[name], expected[name], idle) for name in wrong_dtype]
    if problems:
        more = f" (and {len(problems) - 1:,} more problems)" if len(problems) > 1 else ""
        raise LingError(f"{folder}: {problems[0]}{more}")
    sizes: Counter[str] = Counter()
    for name, info in headers.items():
        sizes[expected[name].role] += info.nbytes
    return CheckpointFacts(
        fmt=shape.fmt,
        shape=shape,
        has_mtp=has_mtp,
        head_scale=head_scale,
        n_tensors=len(headers),
        total_bytes=sum(sizes.values()),
        bytes_by_role=dict(sizes),
    )


def _allow_fp8_head(
    shape: LingShape, headers: dict[str, TensorInfo], expected: dict[str, TensorSpec]
) -> HeadScale:
    head = headers.get("lm_head.weight")
    if head is None or head.dtype != "F8_E4M3":
        return "none"
    vocab, hidden = shape.vocab_size, shape.hidden_size
    expected["lm_head.weight"] = TensorSpec((vocab, hidden), FP8, "head")
    if "lm_head.weight_scale_inv" in headers:
        blocks = (-(-vocab // 128), -(-hidden // 128))
        expected["lm_head.weight_scale_inv"] = TensorSpec(blocks, SCALE, "head")
        return "block"
    row = headers.get("lm_head.weight_scale")
    if row is None:
        raise LingError("lm_head.weight: stored as FP8, but lm_head.weight_scale (or _scale_inv) is missing")
    column = (vocab, 1) if len(row.shape) == 2 else (vocab,)
    expected["lm_head.weight_scale"] = TensorSpec(column, ("F32", "BF16", "F16"), "head")
    return "row"


def _forget_absent_mtp(
    shape: LingShape, headers: dict[str, TensorInfo], expected: dict[str, TensorSpec]
) -> bool:
    """Drops the MTP layers from the table if the checkpoint has none of them: it then serves without speculation."""
    prefixes = tuple(f"model.layers.{layer}." for layer in shape.layers[shape.num_hidden_layers :])
    if not prefixes:
        return False
    if any(name.startswith(prefixes) for name in headers):
        return True
    for name in [name for name in expected if name.startswith(prefixes)]:
        del expected[name]
    return False


def _expert_count(shape: LingShape, headers: dict[str, TensorInfo]) -> list[str]:
    rests = (name.partition(".mlp.experts.")[2] for name in headers)
    stored = {rest.partition(".")[0] for rest in rests if rest}
    if stored and len(stored) != shape.num_experts:
        return [
            f"config.json: num_experts is {shape.num_experts}, but the checkpoint holds {len(stored)} experts"
        ]
    return []


def _dtype_problem(name: str, info: TensorInfo, spec: TensorSpec, idle: list[str]) -> str:
    hint = ""
    if spec.dtypes == FP8 and info.dtype in ("BF16", "F16", "F32"):
        hint = "; is its module missing from quantization_config.modules_to_not_convert?"
        if idle:
            hint += f" (its entry {idle[0]!r} matches no module)"
    return f"{name} ({info.file}): stored as {info.dtype}, expected {' or '.join(spec.dtypes)}{hint}"


def _idle_exclusions(shape: LingShape, headers: dict[str, TensorInfo]) -> list[str]:
    """Exclusions that match nothing: harmless by themselves, but the likely cause of a BF16 tensor taken for FP8."""
    modules = {name.rpartition(".")[0] for name in headers}
    return [e for e in shape.excluded if not any(m == e or m.endswith(f".{e}") for m in modules)]
