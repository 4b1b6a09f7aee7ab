# SPDX-License-Identifier: Apache-2.0
"""Plans a conversion from headers alone: which codec each tensor gets, what comes out, in which output shard."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch

from vllm_ling.checkpoint.headers import TensorInfo
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.tensors import FP8, expected_tensors
from vllm_ling.errors import LingError
from vllm_ling.quant.block_fp8 import quantize_block_fp8
from vllm_ling.quant.int4 import quantize_int4
from vllm_ling.quant.mxfp4 import quantize_mxfp4
from vllm_ling.quant.row_fp8 import quantize_row_fp8

Codec = Literal["keep", "block_fp8", "row_fp8", "mxfp4", "int4"]
_ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the new checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Size of one element in bytes."""
        return _ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One source tensor, its codec, and the tensors that `encode` makes of it, in that order."""

    name: str
    source: TensorInfo
    codec: Codec
    outputs: tuple[Output, ...]

    @property
    def nbytes(self) -> int:
        """Size of the outputs in bytes."""
        return sum(output.nbytes for output in self.outputs)


def plan(headers: Mapping[str, TensorInfo], target: LingShape, head: Literal["bf16", "fp8"]) -> list[Step]:
    """Steps for every tensor of a BF16 checkpoint, in the model's order (it does not depend on the source's shards).

    Args:
        headers: of the source, already validated.
        target: shape of the new checkpoint, its format and exclusions included.

    Raises:
        LingError: an expert's input dimension is not a multiple of 32; names the tensor.
    """
    expected = expected_tensors(target)
    steps = []
    for name in [n for n in expected_tensors(_unquantized(target)) if n in headers]:
        info = headers[name]
        codec: Codec = "keep"
        if name == "lm_head.weight" and head == "fp8":
            codec = "row_fp8"
        elif f"{name}_packed" in expected:
            codec = "int4"
        elif expected[name].dtypes == FP8:
            codec = "block_fp8"
        elif ".mlp.experts." in name and target.fmt == "fp4":
            codec = "mxfp4"
        if codec in ("int4", "mxfp4") and info.shape[-1] % 32:
            raise LingError(
                f"{name}: {target.fmt} needs an input dimension divisible by 32, got {info.shape[-1]}"
            )
        steps.append(Step(name, info, codec, _outputs(name, info, codec)))
    return steps


def pack(steps: list[Step], shard_bytes: int) -> list[list[Step]]:
    """Cuts the steps into shards of at most `shard_bytes`; a weight and its scales stay together."""
    shards: list[list[Step]] = []
    room = 0
    for step in steps:
        if not shards or step.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(step)
        room -= step.nbytes
    return shards


def encode(codec: Codec, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies a codec; the tensors come in the order of `Step.outputs`."""
    return _ENCODERS[codec](weight)


def _unquantized(target: LingShape) -> LingShape:
    return replace(target, fmt="bf16", excluded=())


def _outputs(name: str, info: TensorInfo, codec: Codec) -> tuple[Output, ...]:
    if codec == "keep":
        return (Output(name, info.dtype, info.shape),)
    rows, cols = info.shape
    if codec == "row_fp8":
        return Output(name, "F8_E4M3", info.shape), Output(f"{name}_scale", "F32", (rows,))
    if codec == "block_fp8":
        blocks = (-(-rows // 128), -(-cols // 128))
        return Output(name, "F8_E4M3", info.shape), Output(f"{name}_scale_inv", "F8_E8M0", blocks)
    if codec == "mxfp4":
        return Output(name, "U8", (rows, cols // 2)), Output(f"{name}_scale_inv", "U8", (rows, cols // 32))
    return (
        Output(f"{name}_packed", "I32", (rows, cols // 8)),
        Output(f"{name}_scale", "BF16", (rows, cols // 32)),
        Output(f"{name}_shape", "I64", (2,)),
    )


def _keep(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight,)


def _block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    codes, scale = quantize_block_fp8(weight)
    return codes, scale.to(torch.float8_e8m0fnu)


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (*quantize_int4(weight), torch.tensor(weight.shape))


_ENCODERS: dict[Codec, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "keep": _keep,
    "block_fp8": _block_fp8,
    "row_fp8": quantize_row_fp8,
    "mxfp4": quantize_mxfp4,
    "int4": _int4,
}
