# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 and row-FP8 codecs: every E4M3 byte, minimal scales, rounding, saturation, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.row_fp8 import dequantize_row_fp8, quantize_row_fp8


def e4m3(byte: int) -> float:
    """E4M3 by its definition: bias 7, three mantissa bits, no Inf, NaN only with all seven low bits set."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return math.copysign(magnitude, -1 if byte & 128 else 1)


BYTES = torch.arange(256).to(torch.uint8)
FINITE = BYTES[(BYTES & 127) != 127]
VALUES = torch.tensor([e4m3(byte) for byte in FINITE.tolist()])


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def test_every_byte_decodes_by_definition() -> None:
    codes = BYTES.view(torch.float8_e4m3fn)[None]
    expected = torch.tensor([e4m3(byte) for byte in range(256)])
    by_block = dequantize_block_fp8(codes, torch.full((1, 2), 0.25))[0]
    by_row = dequantize_row_fp8(codes, torch.tensor([0.25]))[0]
    for values in (by_block, by_row):
        assert torch.equal(values.isnan(), expected.isnan())
        assert torch.equal(values.nan_to_num(0), (expected / 4).nan_to_num(0))


def test_every_finite_byte_is_its_own_nearest() -> None:
    codes, scale = quantize_block_fp8(VALUES[None], block=(128, 256))
    assert scale.item() == 1
    assert torch.equal(bits(codes)[0], FINITE)
    codes, scale = quantize_row_fp8(VALUES[None])
    assert scale.item() == 1
    assert torch.equal(bits(codes)[0], FINITE)


def test_ties_go_to_the_even_byte() -> None:
    low = VALUES[:126]
    high = VALUES[1:127]
    assert high[-1] == 448
    middles = torch.cat([(low + high) / 2, torch.tensor([448.0])])
    codes, scale = quantize_block_fp8(middles[None])
    assert scale.item() == 1
    even = [byte if byte % 2 == 0 else byte + 1 for byte in range(126)]
    assert bits(codes)[0].tolist() == [*even, 126]
    assert bits(quantize_row_fp8(-middles[None])[0])[0].tolist() == [128 + byte for byte in [*even, 126]]


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_a_block_scale_is_the_smallest_power_of_two_that_fits(amax: float) -> None:
    _, scale = quantize_block_fp8(torch.tensor([[amax, 0.0]]))
    mantissa, _ = math.frexp(scale.item())
    assert mantissa == 0.5
    # amax / 448 is rounded to float32 before, so allow the last bit; 448 * (1 + 2**-23) still rounds to 448.
    assert amax <= 448 * scale.item() * (1 + 2**-23)
    assert scale.item() == 2.0**-126 or amax > 448 * scale.item() / 2


@pytest.mark.parametrize("exponent", [-140, -126, -100, -3, 0, 5, 100, 110])
def test_round_trip_is_idempotent_at_any_magnitude(exponent: int) -> None:
    weight = noise(130, 140) * 2.0**exponent
    codes, scale = quantize_block_fp8(weight)
    values = dequantize_block_fp8(codes, scale)
    assert values.isfinite().all()
    codes_again, scale_again = quantize_block_fp8(values)
    assert torch.equal(dequantize_block_fp8(codes_again, scale_again), values)
    if exponent > -100:
        assert ((values - weight).abs() <= weight.abs() / 16 + scale.max() * 2.0**-10).all()


def test_one_scale_per_block_and_partial_blocks() -> None:
    weight = torch.ones(130, 300)
    weight[0, 0], weight[129, 299] = 448.0, 448.0 * 1024
    codes, scale = quantize_block_fp8(weight)
    assert scale.tolist() == [[1.0, 2.0**-8, 2.0**-8], [2.0**-8, 2.0**-8, 1024.0]]
    assert codes.shape == weight.shape and codes.dtype == torch.float8_e4m3fn
    assert dequantize_block_fp8(codes, scale)[:129, :255].equal(weight[:129, :255])
    _, exact = quantize_block_fp8(weight * 3, ue8m0=False)
    assert exact[1, 2].item() == 3072.0 and exact[0, 1].item() == pytest.approx(3 / 448)


def test_stored_scale_types_mean_the_same() -> None:
    codes, scale = quantize_block_fp8(noise(200, 200))
    stored = scale.to(torch.float8_e8m0fnu)
    expected = dequantize_block_fp8(codes, scale)
    assert torch.equal(dequantize_block_fp8(codes, stored), expected)
    assert torch.equal(dequantize_block_fp8(codes, stored.view(torch.uint8)), expected)
    assert dequantize_block_fp8(codes, scale, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_row_scales_and_chunks() -> None:
    weight = noise(37, 64) * torch.logspace(-3, 3, 37)[:, None]
    weight[5] = 0
    codes, scale = quantize_row_fp8(weight)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert scale[5] == 1 and not codes[5].float().any()
    rows = [row for row in range(37) if row != 5]
    assert torch.equal(scale[rows], weight[rows].abs().amax(1) / 448)
    for size in (1, 10, 37, 8192):
        chunked = quantize_row_fp8(weight, rows_per_chunk=size)
        assert torch.equal(bits(chunked[0]), bits(codes)) and torch.equal(chunked[1], scale)
    error = (dequantize_row_fp8(codes, scale) - weight).abs()
    assert (error <= weight.abs() / 16 * (1 + 1e-6) + scale[:, None] * 2.0**-10).all()
    assert torch.equal(dequantize_row_fp8(codes, scale[:, None]), dequantize_row_fp8(codes, scale))


@pytest.mark.parametrize("ue8m0", [True, False])
def test_subnormal_and_zero_blocks_do_not_become_nan(ue8m0: bool) -> None:
    weight = torch.zeros(2, 128)
    weight[0, :3] = torch.tensor([2.0**-149, -(2.0**-140), 2.0**-133])
    codes, scale = quantize_block_fp8(weight, block=(1, 128), ue8m0=ue8m0)
    assert scale[1].item() == 1
    assert dequantize_block_fp8(codes, scale, block=(1, 128)).isfinite().all()
    assert dequantize_row_fp8(*quantize_row_fp8(weight)).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(3, 4)
    weight[2, 3] = bad
    for quantize in (quantize_block_fp8, quantize_row_fp8):
        with pytest.raises(ValueError, match="FP8 cannot hold NaN or Inf"):
            quantize(weight)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"matrices, got shape \[2, 3, 4\]"):
        quantize_block_fp8(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"matrices, got shape \[4\]"):
        quantize_row_fp8(torch.ones(4))
    codes = torch.ones(130, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"weight \[130, 4\] and scales \[1, 1\] do not match"):
        dequantize_block_fp8(codes, torch.ones(1, 1))
    with pytest.raises(ValueError, match="do not match"):
        dequantize_block_fp8(codes[0], torch.ones(1))
    with pytest.raises(ValueError, match=r"weight \[130, 4\] and scales \[1\] do not match"):
        dequantize_row_fp8(codes, torch.ones(1))
