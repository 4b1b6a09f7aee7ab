# SPDX-License-Identifier: Apache-2.0
"""INT4 codec: bit-equal to the compressed-tensors library's packing, every code, refusals."""

import math

import pytest
import torch

from vllm_ling.quant.int4 import dequantize_int4, quantize_int4


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    """[N, K / 8] words -> [N, K] values -8..7, by plain integer arithmetic."""
    rows = [[(word >> 4 * i & 15) - 8 for word in row for i in range(8)] for row in packed.tolist()]
    return torch.tensor(rows, dtype=torch.int8)


def test_packing_equals_the_compressed_tensors_library() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    packed, _ = quantize_int4(noise(48, 256))
    codes = codes_of(packed)
    assert set(codes.unique().tolist()) == set(range(-8, 8))
    assert torch.equal(packed, helpers.pack_to_int32(codes, 4))
    assert torch.equal(helpers.unpack_from_int32(packed, 4, codes.shape), codes)


def test_values_equal_the_compressed_tensors_library() -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    weight = noise(16, 128)
    packed, scale = quantize_int4(weight)
    values = forward.fake_quantize(weight, scale.float(), torch.zeros_like(scale.float()), args)
    torch.testing.assert_close(dequantize_int4(packed, scale), values, rtol=0, atol=0)


def test_every_nibble_in_every_place() -> None:
    for place in range(8):
        for code in range(16):
            word = torch.tensor([[code << 4 * place]]).to(torch.uint32).view(torch.int32)
            values = dequantize_int4(word, torch.tensor([[0.5]], dtype=torch.bfloat16))
            expected = torch.full((1, 8), -4.0)
            expected[0, place] = (code - 8) / 2
            assert torch.equal(values, expected)


def test_scale_rounding_saturation_and_zeros() -> None:
    weight = torch.zeros(2, 64)
    weight[0, :6] = torch.tensor([7.5, -7.5, 0.5, 1.5, -2.5, 2.4])
    packed, scale = quantize_int4(weight)
    assert scale.dtype == torch.bfloat16 and packed.dtype == torch.int32
    assert scale.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    # 7.5 rounds to the even 8 and saturates at 7; the range is -8..7.
    assert dequantize_int4(packed, scale)[0, :6].tolist() == [7.0, -8.0, 0.0, 2.0, -2.0, 2.0]
    assert not dequantize_int4(packed, scale)[1].any()


@pytest.mark.parametrize("exponent", [-149, -133, -126, 0, 100])
def test_extreme_magnitudes_stay_finite(exponent: int) -> None:
    weight = noise(4, 64) * 2.0**exponent
    packed, scale = quantize_int4(weight)
    values = dequantize_int4(packed, scale)
    assert values.isfinite().all()
    assert ((values - weight).abs() <= scale.float().repeat_interleave(32, 1)).all()


def test_experts_in_one_tensor_and_other_groups() -> None:
    weight = noise(3, 8, 128)
    packed, scale = quantize_int4(weight, group=64)
    assert packed.shape == (3, 8, 16) and scale.shape == (3, 8, 2)
    one = quantize_int4(weight[1], group=64)
    assert torch.equal(packed[1], one[0]) and torch.equal(scale[1], one[1])
    assert dequantize_int4(packed, scale, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 31] = bad
    with pytest.raises(ValueError, match="INT4 cannot hold NaN or Inf"):
        quantize_int4(weight)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"divisible by 32, got \[2, 40\]"):
        quantize_int4(torch.ones(2, 40))
    words = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"words \[2, 4\] and scales \[3, 1\] do not match"):
        dequantize_int4(words, torch.ones(3, 1))
    with pytest.raises(ValueError, match="do not match"):
        dequantize_int4(words, torch.ones(2, 3))
