# SPDX-License-Identifier: Apache-2.0
"""INT4 codec in plain torch: symmetric groups along K, packed as compressed-tensors' `pack-quantized` format."""

import torch

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
    if weight.shape[-1] % group or group % _PER_WORD:
        raise ValueError(f"INT4 needs a last dimension divisible by {group}, got {list(weight.shape)}")
    blocks = weight.float().unflatten(-1, (-1, group))
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("INT4 cannot hold NaN or Inf")
    # A scale below BF16's normal range could round to zero.
    smallest = torch.finfo(torch.bfloat16).tiny
    scale = torch.where(amax == 0, torch.ones_like(amax), (amax / 7.5).clamp_min(smallest)).bfloat16()
    codes = (blocks / scale.float()[..., None]).round().clamp(-8, 7).flatten(-2).to(torch.int64) + 8
    shifts = torch.arange(0, 32, 4, device=weight.device)
    words = (codes.unflatten(-1, (-1, _PER_WORD)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), scale


def dequantize_int4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Packed int32 [..., K / 8] and scales [..., K / group] -> values [..., K] in `dtype`.

    Raises:
        ValueError: the shapes do not belong together.
    """
    size = packed.shape[-1] * _PER_WORD
    if packed.shape[:-1] != scale.shape[:-1] or size % scale.shape[-1]:
        raise ValueError(f"INT4 words {list(packed.shape)} and scales {list(scale.shape)} do not match")
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    values = (((packed[..., None] >> shifts) & 15) - 8).flatten(-2).float()
    groups = values.unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]
    return groups.flatten(-2).to(dtype)
