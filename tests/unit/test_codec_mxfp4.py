# SPDX-License-Identifier: Apache-2.0
"""MXFP4 codec: every code, every scale, rounding to even, saturation, and refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ling.quant.mxfp4 import dequantize_mxfp4, e8m0_to_float, quantize_mxfp4

# E2M1 by its definition: sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal.
CODES = [
    (-1) ** (code >> 3)
    * (2.0 ** ((code >> 1 & 3) - 1) * (1 + (code & 1) / 2) if code & 6 else (code & 1) / 2)
    for code in range(16)
]


def block_of(*values: float) -> torch.Tensor:
    """One block of 32: the values, then zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def codes_of(packed: torch.Tensor) -> list[int]:
    return [nibble for byte in packed.tolist() for nibble in (byte & 15, byte >> 4)]


def test_all_codes_at_all_scales() -> None:
    packed = torch.tensor([low | high << 4 for low in range(16) for high in range(16)], dtype=torch.uint8)
    for byte in range(255):
        scale = torch.full((16,), byte, dtype=torch.uint8)
        values = dequantize_mxfp4(packed, scale)
        # A code times the largest scales leaves float32's range; below that every product is exact.
        expected = torch.tensor([CODES[c] for c in codes_of(packed)], dtype=torch.float64) * 2.0 ** (
            byte - 127
        )
        assert torch.equal(values, expected.float()), byte


def test_scale_bytes() -> None:
    every = torch.arange(256).to(torch.uint8)
    values = e8m0_to_float(every)
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])
    assert torch.equal(values[:255], e8m0_to_float(every.view(torch.float8_e8m0fnu))[:255])
    assert dequantize_mxfp4(torch.zeros(16, dtype=torch.uint8), every[255:]).isnan().all()


@pytest.mark.parametrize("byte", range(1, 253))
def test_a_block_that_mxfp4_holds_exactly_comes_back(byte: int) -> None:
    packed = torch.tensor([low | high << 4 for low in range(8) for high in (7, 15)], dtype=torch.uint8)
    scale = torch.tensor([byte], dtype=torch.uint8)
    again = quantize_mxfp4(dequantize_mxfp4(packed, scale))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    # 4.0 fixes the block's scale at 1.
    for sign in (1, -1):
        around = [sign * value, sign * value * (1 - 2**-20), sign * value * (1 + 2**-20), 4.0]
        tie, below, above, _ = dequantize_mxfp4(*quantize_mxfp4(block_of(*around)))[:4].tolist()
        assert tie == sign * rounded
        assert abs(below) <= abs(tie) <= abs(above)
        assert abs(below) < abs(above)


@given(st.lists(st.floats(-7.9375, 7.9375, width=32), min_size=31, max_size=31))
def test_rounding_agrees_with_a_search(values: list[float]) -> None:
    packed, scale = quantize_mxfp4(block_of(4.0, *values))
    assert scale.tolist() == [127]
    for value, code in zip([4.0, *values], codes_of(packed), strict=True):
        assert code & 7 == min(range(8), key=lambda c: (abs(CODES[c] - abs(value)), c & 1))
        assert bool(code & 8) == (math.copysign(1, value) < 0)


def test_values_above_six_scales_saturate() -> None:
    packed, scale = quantize_mxfp4(block_of(7.9, -7.9, 6.5))
    assert scale.tolist() == [127]
    assert dequantize_mxfp4(packed, scale)[:3].tolist() == [6.0, -6.0, 6.0]


@pytest.mark.parametrize(
    "amax", [2.0**-149, 2.0**-127, 2.0**-126, 1e-30, 3.0e38, torch.finfo(torch.float32).max]
)
def test_extreme_magnitudes_stay_finite(amax: float) -> None:
    packed, scale = quantize_mxfp4(block_of(amax, -amax))
    assert 1 <= scale.item() <= 254
    back = dequantize_mxfp4(packed, scale)
    assert back.isfinite().all()
    # The last quarter of the binade saturates, by at most 2 of 8 steps; the smallest scale may round to zero.
    assert abs(back[0].item() - amax) <= max(amax / 4, 2.0**-128)


def test_zero_blocks_have_scale_one() -> None:
    packed, scale = quantize_mxfp4(torch.zeros(2, 64))
    assert not packed.any()
    assert scale.tolist() == [[127, 127], [127, 127]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip_is_idempotent_and_keeps_shape(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed, scale = quantize_mxfp4(weight)
    assert (packed.shape, packed.dtype) == ((3, 5, 48), torch.uint8)
    assert (scale.shape, scale.dtype) == ((3, 5, 3), torch.uint8)
    values = dequantize_mxfp4(packed, scale, torch.bfloat16)
    assert values.dtype == torch.bfloat16
    again = dequantize_mxfp4(*quantize_mxfp4(values), torch.bfloat16)
    assert torch.equal(again, values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="MXFP4 cannot hold NaN or Inf"):
        quantize_mxfp4(block_of(1.0, bad))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"divisible by 32, got \[2, 48\]"):
        quantize_mxfp4(torch.zeros(2, 48))
    with pytest.raises(ValueError, match=r"codes \[2, 16\] and scales \[2, 2\] do not match"):
        dequantize_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not match"):
        dequantize_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8))
