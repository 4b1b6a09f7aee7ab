# SPDX-License-Identifier: Apache-2.0
"""MXFP4 codec in plain torch: E2M1 values in blocks of 32 with one E8M0 scale (OCP Microscaling Formats v1.0)."""

from itertools import pairwise

import torch

from vllm_ling.quant.chunks import as_rows, row_chunks

BLOCK = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Largest E2M1 exponent; the OCP rule takes floor(log2(amax)) minus this as the block's exponent.
_EMAX = 2


def e8m0_to_float(scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """E8M0 bytes (uint8 or float8_e8m0fnu) -> 2**(byte - 127); byte 255 is NaN."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32).to(dtype)


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds to MXFP4, ties to even, saturating at 6 times the scale.

    Args:
        weight: [..., K] floating point, K a multiple of 32, finite.

    Returns:
        codes uint8 [..., K / 2] (low nibble = even index) and scales uint8 [..., K / 32] (2**(byte - 127)).

    Raises:
        ValueError: K is not a multiple of 32, or a value is NaN or Inf.
    """
    if weight.ndim == 0 or weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a last dimension divisible by {BLOCK}, got {list(weight.shape)}")
    lead, size = weight.shape[:-1], weight.shape[-1]
    rows = as_rows(weight)
    codes = torch.empty(rows.shape[0], size // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows.shape[0], size // BLOCK, dtype=torch.uint8, device=weight.device)
    for part in row_chunks(*rows.shape):
        codes[part], scale[part] = _quantize(rows[part])
    return codes.view(*lead, size // 2), scale.view(*lead, size // BLOCK)


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = rows.float().view(rows.shape[0], rows.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("MXFP4 cannot hold NaN or Inf")
    # frexp: amax = m * 2**e with 0.5 <= m < 1, so floor(log2(amax)) = e - 1.
    exponent = torch.frexp(amax).exponent - 1 - _EMAX
    exponent = torch.where(amax == 0, torch.zeros_like(exponent), exponent).clamp(-126, 127)
    # A power of two within float32's normal range: the product is exact.
    scaled = blocks * torch.ldexp(torch.ones_like(amax), -exponent)[..., None]
    codes = _nearest(scaled.abs()) | (scaled.signbit().to(torch.uint8) << 3)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def _nearest(magnitude: torch.Tensor) -> torch.Tensor:
    """Index of the nearest E2M1 magnitude; ties go to the even code."""
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
    for code, (value, above) in enumerate(pairwise(_VALUES)):
        middle = (value + above) / 2
        codes += magnitude > middle if code % 2 == 0 else magnitude >= middle
    return codes


def dequantize_mxfp4(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """MXFP4 [..., K / 2] bytes and [..., K / 32] scales (uint8 or float8_e8m0fnu) -> values [..., K] in `dtype`.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if (
        codes.ndim == 0
        or codes.shape[:-1] != scale.shape[:-1]
        or codes.shape[-1] != scale.shape[-1] * BLOCK // 2
    ):
        raise ValueError(f"MXFP4 codes {list(codes.shape)} and scales {list(scale.shape)} do not match")
    table = torch.tensor(_VALUES + tuple(-v for v in _VALUES), device=codes.device)
    rows, row_scale = as_rows(codes), as_rows(scale)
    values = torch.empty(rows.shape[0], 2 * rows.shape[1], dtype=dtype, device=codes.device)
    for part in row_chunks(*values.shape):
        pairs = torch.stack([table[(rows[part] & 15).int()], table[(rows[part] >> 4).int()]], dim=-1)
        blocks = pairs.view(*row_scale[part].shape, BLOCK) * e8m0_to_float(row_scale[part])[..., None]
        values[part] = blocks.flatten(1)
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])
