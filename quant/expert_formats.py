# SPDX-License-Identifier: Apache-2.0
"""How each checkpoint format stores routed experts: which parameters vLLM's expert loader fills, and what they mean."""

from dataclasses import dataclass

import torch

from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.int4 import dequantize_int4
from vllm_ling.quant.moe_policy import ExpertFormat
from vllm_ling.quant.mxfp4 import dequantize_mxfp4


@dataclass(frozen=True)
class Field:
    """One tensor per expert matrix [rows, cols].

    Attributes:
        suffix: parameter name after `w13_` or `w2_`.
        rows, cols: elements of the matrix covered by one entry of the tensor.
        scale_kind: vLLM's tag that routes a scale through its grouped loader; None for weights.
    """

    suffix: str
    dtype: torch.dtype | None
    rows: int = 1
    cols: int = 1
    scale_kind: str | None = None
    source_dtypes: tuple[torch.dtype, ...] = ()


_E8M0 = (torch.uint8, torch.float8_e8m0fnu, torch.float32)
# compressed-tensors also stores the unpacked shape; it only has to be read.
FIELDS: dict[ExpertFormat, tuple[Field, ...]] = {
    "bf16": (Field("weight", None),),
    "fp8": (
        Field("weight", torch.float8_e4m3fn),
        Field("weight_scale_inv", torch.float32, 128, 128, "block", (torch.float32, torch.float8_e8m0fnu)),
    ),
    "mxfp4": (
        Field("weight", torch.uint8, cols=2),
        Field("weight_scale", torch.uint8, cols=32, scale_kind="block", source_dtypes=_E8M0),
    ),
    "int4": (
        Field("weight_packed", torch.int32, cols=8),
        Field("weight_scale", None, cols=32, scale_kind="group"),
    ),
}


def dequantize_expert(
    fmt: ExpertFormat, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """One expert's matrix [..., rows, cols] in `dtype`, from its stored fields (keyed by suffix)."""
    if fmt == "bf16":
        return tensors["weight"].to(dtype)
    if fmt == "fp8":
        return dequantize_block_fp8(tensors["weight"], tensors["weight_scale_inv"], (128, 128), dtype)
    if fmt == "mxfp4":
        return dequantize_mxfp4(tensors["weight"], tensors["weight_scale"], dtype)
    return dequantize_int4(tensors["weight_packed"], tensors["weight_scale"], dtype)


def e8m0_bytes(loaded: torch.Tensor) -> torch.Tensor:
    """E8M0 scales as raw exponent bytes, from bytes, float8_e8m0fnu or power-of-two floats."""
    if loaded.dtype == torch.uint8:
        return loaded
    return loaded.to(torch.float8_e8m0fnu).view(torch.uint8)
