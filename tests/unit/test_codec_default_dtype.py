# SPDX-License-Identifier: Apache-2.0
"""vLLM loads weights with the model's dtype as torch's default: no codec may take its precision from there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.int4 import dequantize_int4, quantize_int4
from vllm_ling.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from vllm_ling.quant.row_fp8 import dequantize_row_fp8, quantize_row_fp8


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64])
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("quantize", "dequantize"),
    [
        (quantize_mxfp4, dequantize_mxfp4),
        (quantize_block_fp8, dequantize_block_fp8),
        (lambda weight: quantize_block_fp8(weight, ue8m0=False), dequantize_block_fp8),
        (quantize_row_fp8, dequantize_row_fp8),
        (quantize_int4, dequantize_int4),
    ],
    ids=["mxfp4", "block_ue8m0", "block_float", "row", "int4"],
)
def test_the_default_dtype_changes_no_bit(
    quantize: Callable[..., Any], dequantize: Callable[..., Any], other_default: torch.dtype
) -> None:
    # A prime slope: maxima that BF16 would round.
    weight = torch.linspace(-1.0009765625, 1.0101, 40 * 160, dtype=torch.float32).view(40, 160) * 1.618034
    odd = quantize(weight), dequantize(*quantize(weight))
    torch.set_default_dtype(torch.float32)
    plain = quantize(weight), dequantize(*quantize(weight))
    for left, right in zip((*odd[0], odd[1]), (*plain[0], plain[1]), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
