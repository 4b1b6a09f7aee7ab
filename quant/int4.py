# SPDX-License-Identifier: Apache-2.0
"""INT4 codec in plain torch: symmetric groups along K, packed as compressed-tensors' `pack-quantized` format."""

import torch

from vllm_ling.quant.chunks import as_rows, row_chunks

GROUP = 32
_PER_WORD = 8


def quantize_int4(weight: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds to integers -8..7 times a BF16 scale per group.

    Args:
        weight: [..., K] floating point, K a multiple of `group`, finite.

    Returns:
        packed int32 [..., K / 8] (element i in bits 4 * (i % 8), stored as value + 8) and BF16 scales [..., K / group].

    Raises:
        ValueError: K does not divide, or a value is NaN or Inf.
    """
    if weight.ndim == 0 or weight.shape[-1] % group or group % _PER_WORD:
        raise ValueError(f"INT4 needs a last dimension divisible by {group}, got {list(weight.shape)}")
    lead, size = weight.shape[:-1], weight.shape[-1]
    rows = as_rows(weight)
    packed = torch.empty(rows.shape[0], size // _PER_WORD, dtype=torch.int32, device=weight.device)
    scale = torch.empty(rows.shape[0], size // group, dtype=torch.bfloat16, device=weight.device)
    for part in row_chunks(*rows.shape):
        packed[part], scale[part] = _quantize(rows[part], group)
    return packed.view(*lead, size // _PER_WORD), scale.view(*lead, size // group)


def _quantize(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = rows.float().view(rows.shape[0], rows.shape[1] // group, group)
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("INT4 cannot hold NaN or Inf")
    # A scale below BF16's normal range could round to zero.
    smallest = torch.finfo(torch.bfloat16).tiny
    scale = torch.where(amax == 0, torch.ones_like(amax), (amax / 7.5).clamp_min(smallest)).bfloat16()
    codes = (blocks / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=rows.device)
    # The nibbles do not overlap, so the sum is their union; the top one may wrap into the sign bit, as it should.
    words = codes.view(rows.shape[0], rows.shape[1] // _PER_WORD, _PER_WORD) << shifts
    return words.sum(-1, dtype=torch.int32), scale


def dequantize_int4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Packed int32 [..., K / 8] and scales [..., K / group] -> values [..., K] in `dtype`.

    Raises:
        ValueError: the shapes do not belong together.
    """
    size = packed.shape[-1] * _PER_WORD if packed.ndim else 1
    groups = scale.shape[-1] if scale.ndim else 0
    if packed.shape[:-1] != scale.shape[:-1] or (size % groups if groups else size):
        raise ValueError(f"INT4 words {list(packed.shape)} and scales {list(scale.shape)} do not match")
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    words, row_scale = as_rows(packed), as_rows(scale)
    values = torch.empty(words.shape[0], size, dtype=dtype, device=packed.device)
    for part in row_chunks(*values.shape):
        codes = ((words[part][..., None] >> shifts) & 15) - 8
        blocks = (
            codes.view(codes.shape[0], groups, size // max(groups, 1)) * row_scale[part].float()[..., None]
        )
        values[part] = blocks.flatten(1)
    return values.view(*packed.shape[:-1], size)
