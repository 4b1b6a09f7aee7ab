# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 codec in plain torch: E4M3 values with one scale per 128x128 block, a power of two where `ue8m0`."""

import torch

from vllm_ling.quant.chunks import row_chunks

E4M3_MAX = 448.0
# A subnormal scale would lose bits, or round to zero and turn its block into NaN.
MIN_SCALE = torch.finfo(torch.float32).tiny


def quantize_block_fp8(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix to E4M3 per block; the scale is the smallest that keeps the block within 448.

    Args:
        weight: [N, K] floating point, finite.

    Returns:
        float8_e4m3fn [N, K] and float32 scales [ceil(N / block0), ceil(K / block1)]; value = code * scale.

    Raises:
        ValueError: not a matrix, or a value is NaN or Inf.
    """
    if weight.ndim != 2:
        raise ValueError(f"block FP8 quantizes matrices, got shape {list(weight.shape)}")
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(_grid(weight.shape, block), dtype=torch.float32, device=weight.device)
    for part in row_chunks(weight.shape[0], weight.shape[1], multiple=block[0]):
        codes[part], scale[_block_rows(part, block)] = _quantize(weight[part].float(), block, ue8m0)
    return codes, scale


def _quantize(weight: torch.Tensor, block: tuple[int, int], ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = _grid(weight.shape, block)
    missing = (0, cols * block[1] - weight.shape[1], 0, rows * block[0] - weight.shape[0])
    padded = torch.nn.functional.pad(weight, missing) if any(missing) else weight
    amax = padded.unflatten(1, (cols, block[1])).unflatten(0, (rows, block[0])).abs().amax((1, 3))
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("FP8 cannot hold NaN or Inf")
    scale = torch.where(amax == 0, torch.ones_like(amax), (amax / E4M3_MAX).clamp_min(MIN_SCALE))
    if ue8m0:
        # frexp is exact where log2 is not: scale = m * 2**e with 0.5 <= m < 1.
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    scaled = weight / _expand(scale, weight.shape, block)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantize_block_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """E4M3 [N, K] and block scales (float32, float8_e8m0fnu or E8M0 bytes) -> values [N, K] in `dtype`.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if weight.ndim != 2 or scale.shape != _grid(weight.shape, block):
        raise ValueError(f"block-FP8 weight {list(weight.shape)} and scales {list(scale.shape)} do not match")
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for part in row_chunks(weight.shape[0], weight.shape[1], multiple=block[0]):
        codes = weight[part].float()
        values[part] = codes * _expand(scale[_block_rows(part, block)].float(), codes.shape, block)
    return values


def _grid(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Blocks along each dimension, the incomplete last ones included."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _block_rows(part: slice, block: tuple[int, int]) -> slice:
    return slice(part.start // block[0], -(-part.stop // block[0]))


def _expand(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    full = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], : shape[1]]
