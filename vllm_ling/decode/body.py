# SPDX-License-Identifier: Apache-2.0
"""A whole decode step over the layers: from the embedding to the residual stream before the final norm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import DenseLayer, KdaLayer, MlaLayer, MoELayer, Workspace

# What an MoE block asks for while its router is decided. Too little leaves memory idle, too much delays its own
# experts; of an H200's 50 MB of L2 more than half is not worth filling.
AHEAD_BYTES = 21 << 20


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer."""

    attention: KdaLayer | MlaLayer
    mlp: MoELayer | DenseLayer


class FusedBody:
    """All layers of a model (or the MTP layer alone), run one after another.

    Attributes:
        taps: if a dict, receives a copy of the residual stream after each layer, by its number (for comparisons).
    """

    def __init__(
        self, layers: Sequence[FusedLayer], space: Workspace, after: Sequence[torch.Tensor] = ()
    ) -> None:
        """`after` is what follows the last layer and is worth asking for ahead: the head."""
        self._layers, self._space = list(layers), space
        firsts = [layer.attention.in_proj.weight for layer in layers[1:]]
        self._ahead = [leading(reversed_parts(weights)) for weights in (*firsts, list(after))]
        self.taps: dict[int, torch.Tensor] | None = None

    def __call__(
        self, residual: torch.Tensor, positions: torch.Tensor, batch: KdaBatch | None
    ) -> torch.Tensor:
        """Adds every layer to `residual` (BF16 [tokens, hidden], contiguous) in place and returns it.

        Args:
            residual: the embedding.
            positions: int64 [tokens].
            batch: the KDA layers' sequences; None only if there is no such layer.
        """
        for number, (layer, ahead) in enumerate(zip(self._layers, self._ahead, strict=True)):
            early = layer.mlp.early()
            if isinstance(layer.attention, KdaLayer):
                assert batch is not None
                layer.attention(residual, self._space, batch, early)
            else:
                layer.attention(residual, self._space, positions, early)
            layer.mlp(residual, self._space, ahead)
            if self.taps is not None:
                self.taps[number] = residual.clone()
        return residual


def reversed_parts(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The last parts first: a launch reads them last, so that they have arrived by then."""
    return list(weights)[::-1]


def leading(weights: Sequence[torch.Tensor], limit: int = AHEAD_BYTES) -> tuple[torch.Tensor, ...]:
    """As many rows of up to two of `weights` as fit into `limit` bytes."""
    taken: list[torch.Tensor] = []
    for weight in weights[:2]:
        row = weight.shape[-1] * weight.element_size()
        rows = min(weight.shape[0], limit // row)
        if rows:
            taken.append(weight[:rows])
        limit -= rows * row
    return tuple(taken)
