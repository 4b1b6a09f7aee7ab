# SPDX-License-Identifier: Apache-2.0
"""What a reference model remembers between calls of one batch: KDA states, MLA keys and values, positions."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class KdaState:
    """conv: the last taps-1 inputs of the convolutions [B, taps-1, 3*H*D]; memory: [B, H, D, D] float32."""

    conv: Tensor
    memory: Tensor


@dataclass
class MlaState:
    """Keys [B, S, H, K] and values [B, S, H, V] of all tokens so far; empty before the first call."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new tokens and returns everything."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=1)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=1)
        return self.keys, self.values


@dataclass
class Cache:
    """One entry per decoder layer, made at first use, and the mask [B, S] of the tokens seen."""

    layers: dict[int, KdaState | MlaState] = field(default_factory=dict)
    mask: Tensor | None = None

    def extend(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns their positions [B, T] and which keys each of them may see [B, T, S]."""
        new = mask.shape[1]
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        total = self.mask.shape[1]
        positions = (self.mask.long().cumsum(1) - 1).clamp(min=0)[:, -new:]
        causal = torch.ones(new, total, dtype=torch.bool, device=mask.device).tril(total - new)
        return positions, causal & self.mask.unsqueeze(1)
