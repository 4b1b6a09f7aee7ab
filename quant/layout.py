# SPDX-License-Identifier: Apache-2.0
"""The expert layout that the decode kernels read: tensor-core fragments, as Humming's W4A16 repacking produces them.

Codes, int32 [E, K / 16, N / 64, 32 lanes, 4]: lane = 4 g + t; word j covers rows 16 j + {g, g + 8} of the 64 and
columns 2 t + {0, 1, 8, 9} of the 16, nibble 4 i6 + 2 i4 + i5 holding row + 8 i4, column + 8 i5 + i6.
Scales, uint8 [E, K / 32, N / 64, 8, 8]: byte [g][i] belongs to row g + 8 i of the 64.
"""

import torch


def to_fragments(codes: torch.Tensor) -> torch.Tensor:
    """Checkpoint codes uint8 [E, N, K / 2] -> int32 [E, K / 16, N / 64, 32, 4].

    Raises:
        ValueError: N is not a multiple of 64 or K not one of 16.
    """
    experts, rows, half = codes.shape
    if rows % 64 or half % 8:
        raise ValueError(f"fragments need N % 64 == 0 and K % 16 == 0, got N={rows}, K={2 * half}")
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(
        experts, rows // 64, 4, 2, 8, half // 8, 2, 4, 2
    )
    # e, n64, j, i4, g, k16, i5, t, i6  ->  e, k16, n64, g, t, j, (i6, i4, i5)
    ordered = nibbles.permute(0, 5, 1, 4, 7, 2, 8, 3, 6).flatten(-3).int()
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    return (ordered << shifts).sum(-1, dtype=torch.int32).flatten(3, 4)


def from_fragments(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_fragments`: int32 [E, K / 16, N / 64, 32, 4] -> uint8 [E, N, K / 2]."""
    experts, k16, n64 = words.shape[:3]
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    nibbles = ((words[..., None] >> shifts) & 15).to(torch.uint8).view(experts, k16, n64, 8, 4, 4, 2, 2, 2)
    # e, k16, n64, g, t, j, i6, i4, i5  ->  e, n64, j, i4, g, k16, i5, t, i6
    ordered = nibbles.permute(0, 2, 5, 7, 3, 1, 8, 4, 6).reshape(experts, n64 * 64, k16 * 8, 2)
    return ordered[..., 0] | (ordered[..., 1] << 4)


def to_fragment_scales(scales: torch.Tensor) -> torch.Tensor:
    """Checkpoint scales uint8 [E, N, K / 32] -> [E, K / 32, N / 64, 8, 8]."""
    experts, rows, groups = scales.shape
    return scales.view(experts, rows // 64, 8, 8, groups).permute(0, 4, 1, 3, 2).contiguous()


def from_fragment_scales(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_fragment_scales`."""
    experts, groups, n64 = scales.shape[:3]
    return scales.permute(0, 2, 4, 3, 1).reshape(experts, n64 * 64, groups)
