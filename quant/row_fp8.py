# SPDX-License-Identifier: Apache-2.0
"""Row-FP8 codec in plain torch: E4M3 values with one float32 scale per row, for the output head."""

import torch

from vllm_ling.quant.block_fp8 import E4M3_MAX, MIN_SCALE


def quantize_row_fp8(weight: torch.Tensor, rows_per_chunk: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row to E4M3 with scale amax / 448, chunk by chunk to bound memory; a zero row has scale 1.

    Args:
        weight: [V, H] floating point, finite.

    Returns:
        float8_e4m3fn [V, H] and float32 [V]; value = code * scale.

    Raises:
        ValueError: not a matrix, or a value is NaN or Inf.
    """
    if weight.ndim != 2:
        raise ValueError(f"row FP8 quantizes matrices, got shape {list(weight.shape)}")
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], device=weight.device, dtype=torch.float32)
    for begin in range(0, weight.shape[0], rows_per_chunk):
        part = slice(begin, begin + rows_per_chunk)
        rows = weight[part].float()
        amax = rows.abs().amax(-1)
        if not bool(torch.isfinite(amax).all()):
            raise ValueError("FP8 cannot hold NaN or Inf")
        scale[part] = torch.where(amax == 0, torch.ones_like(amax), (amax / E4M3_MAX).clamp_min(MIN_SCALE))
        codes[part] = (rows / scale[part, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def dequantize_row_fp8(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """E4M3 [V, H] and float32 scales [V] -> values [V, H] in `dtype`.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if codes.ndim != 2 or scale.numel() != codes.shape[0]:
        raise ValueError(f"row-FP8 weight {list(codes.shape)} and scales {list(scale.shape)} do not match")
    return (codes.float() * scale.view(-1, 1)).to(dtype)
