# SPDX-License-Identifier: Apache-2.0
"""A whole decode step over the layers: from the embedding to the residual stream before the final norm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import DenseLayer, KdaLayer, MlaLayer, MoELayer, Workspace


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer."""

    attention: KdaLayer | MlaLayer
    mlp: MoELayer | DenseLayer


class FusedBody:
    """All layers of a model (or the MTP layer alone), run one after another.

    Attributes:
        layers: what it runs.
        space: their buffers.
        taps: if a dict, receives a copy of the residual stream after each layer, by its number (for comparisons).
    """

    def __init__(self, layers: Sequence[FusedLayer], space: Workspace) -> None:
        self.layers, self.space = tuple(layers), space
        self.taps: dict[int, torch.Tensor] | None = None

    def attended(self, tokens: int) -> int:
        """How many MLA layers attend with our kernel in the current batch of `tokens` tokens."""
        kernels = [layer.attention.latent for layer in self.layers if isinstance(layer.attention, MlaLayer)]
        return sum(kernel is not None and kernel.batch(tokens) is not None for kernel in kernels)

    def attends_alone(self, tokens: int) -> bool:
        """Whether no MLA layer attends with vLLM's kernel in the current batch of `tokens` tokens."""
        return self.attended(tokens) == sum(isinstance(layer.attention, MlaLayer) for layer in self.layers)

    def __call__(
        self, residual: torch.Tensor, positions: torch.Tensor, batches: Mapping[str, KdaBatch]
    ) -> torch.Tensor:
        """Adds every layer to `residual` (BF16 [tokens, hidden], contiguous) in place and returns it.

        Args:
            residual: the embedding.
            positions: int64 [tokens].
            batches: the sequences as each KDA layer, by its name, has them.
        """
        for number, layer in enumerate(self.layers):
            if isinstance(layer.attention, KdaLayer):
                layer.attention(residual, self.space, batches)
            else:
                layer.attention(residual, self.space, positions)
            layer.mlp(residual, self.space)
            if self.taps is not None:
                self.taps[number] = residual.clone()
        return residual
