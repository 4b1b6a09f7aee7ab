# SPDX-License-Identifier: Apache-2.0
"""Codecs work through large tensors in row chunks: the same bits as in one piece, and bounded temporaries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_ling.quant import chunks
from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.int4 import dequantize_int4, quantize_int4
from vllm_ling.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4

CODECS = [
    pytest.param(quantize_mxfp4, dequantize_mxfp4, id="mxfp4"),
    pytest.param(quantize_int4, dequantize_int4, id="int4"),
    pytest.param(quantize_block_fp8, dequantize_block_fp8, id="block_fp8"),
]


@pytest.mark.parametrize(("rows", "multiple"), [(0, 1), (1, 1), (300, 1), (300, 128), (256, 128)])
def test_chunks_cover_every_row_once(rows: int, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 64 * 10)
    parts = list(chunks.row_chunks(rows, 64, multiple))
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    assert all(part.start % multiple == 0 for part in parts)


@pytest.mark.parametrize(("quantize", "dequantize"), CODECS)
def test_chunks_do_not_change_a_bit(
    quantize: Callable[..., Any], dequantize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 320, generator=generator) * torch.logspace(-6, 6, 300)[:, None]
    weight[7] = 0
    whole = quantize(weight)
    values = dequantize(*whole)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 5000)
    assert len(list(chunks.row_chunks(300, 320, 1))) > 10
    for one, many in zip(whole, quantize(weight), strict=True):
        assert torch.equal(one.view(torch.uint8), many.view(torch.uint8))
    assert torch.equal(dequantize(*whole), values)


@pytest.mark.parametrize(("quantize", "dequantize"), CODECS[:2])
def test_no_rows_and_no_dimensions(quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> None:
    assert dequantize(*quantize(torch.ones(0, 64))).shape == (0, 64)
    with pytest.raises(ValueError, match=r"divisible by 32, got \[\]"):
        quantize(torch.tensor(1.0))
