# SPDX-License-Identifier: Apache-2.0
"""The layers of the fused path: each adds its part to the residual stream in place, in as few launches as it takes.

A KDA layer is three launches (norm and projections; convolutions to gated norm; output projection), an MoE block one,
an MLA layer five (or three around vLLM's attention), a dense MLP two. Every launch starts while the one before still
runs and fills its shared memory with weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ling.decode.kda_step import KdaBatch, KdaStates, KdaStep, KdaWeights
from vllm_ling.decode.mla_attention import LatentWeights, MlaAttention, MlaBatch
from vllm_ling.decode.mla_prepare import MlaInputs, MlaPrepare, MlaWeights
from vllm_ling.quant.decode_moe import MoEDecoder, MoEWeights
from vllm_ling.quant.fp8_gemv import Fp8Gemv

Norm = tuple[torch.Tensor, float]
"""BF16 [hidden] weight and epsilon."""


class Workspace:
    """Buffers that all layers share, for up to `tokens` tokens; grown by `take`, never while a graph is captured."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens, self._device = tokens, device
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """`dtype` [tokens, width], contiguous. Zeros at first: rows of padded sequences may stay unwritten."""
        key = (name, width, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self.tokens, width, dtype=dtype, device=self._device)
        return self._buffers[key][:tokens]


@dataclass(frozen=True)
class Projection:
    """A block-FP8 matrix and its kernel. `weight` E4M3 [rows, k] and `scales` float32 by 128x128 block, in parts."""

    gemv: Fp8Gemv
    weight: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]

    @property
    def rows(self) -> int:
        """Output width."""
        return self.gemv.shape.rows

    def __call__(self, x: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `Fp8Gemv.__call__`."""
        return self.gemv(x, self.weight, self.scales, out, **options)


@dataclass(frozen=True)
class Entry:
    """The MTP layer's projection of an embedding and a hidden state side by side, with the norms before it.

    Attributes:
        right_norm: BF16 [hidden], the weight of the hidden state's norm; its epsilon is the left one's.
    """

    projection: Projection
    left_norm: Norm
    right_norm: torch.Tensor

    @property
    def max_tokens(self) -> int:
        """The most tokens that a call takes."""
        return self.projection.gemv.max_tokens

    def __call__(self, embeds: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """All BF16 [tokens, hidden]."""
        return self.projection(embeds, out, norm=self.left_norm, second=(hidden, self.right_norm))


@dataclass(frozen=True)
class KdaLayer:
    """KDA with the norm before it. `states` is asked at every call, as vLLM may move its pool.

    Attributes:
        name: finds the layer's sequences: layers lie in several groups, and each group has state slots of its own.
    """

    name: str
    norm: Norm
    in_proj: Projection
    step: KdaStep
    weights: KdaWeights
    states: Callable[[], KdaStates]
    out_proj: Projection

    def __call__(self, residual: torch.Tensor, space: Workspace, batches: Mapping[str, KdaBatch]) -> None:
        """Adds the layer's output to `residual`, BF16 [tokens, hidden]."""
        tokens, hidden = residual.shape
        mixed = space.take("mixed", tokens, self.out_proj.gemv.shape.k)
        projected = space.take("projected", tokens, self.in_proj.rows)
        normed = space.take("normed", tokens, hidden)
        self.in_proj(residual, projected, norm=self.norm, normed=normed)
        self.step(projected, normed, self.weights, self.states(), batches[self.name], mixed)
        self.out_proj(mixed, residual, residual=residual)


@dataclass(frozen=True)
class LatentAttention:
    """Our attention of an MLA layer: from its first projection to its output projection.

    Attributes:
        weights: asked at every call (reloads).
        batch: the current one of a number of tokens, or None where vLLM's attention has to do.
        scale: of the scores.
    """

    kernel: MlaAttention
    weights: Callable[[], LatentWeights]
    batch: Callable[[int], MlaBatch | None]
    scale: float


@dataclass(frozen=True)
class MlaLayer:
    """MLA with the norm before it.

    Attributes:
        attend: vLLM's attention (cache update, latent projections, attention), after `prepare`.
        latent: our attention, which takes the place of both, or None.
    """

    norm: Norm
    in_proj: Projection
    prepare: MlaPrepare
    weights: MlaWeights
    attend: Callable[[MlaInputs], torch.Tensor]
    out_proj: Projection
    latent: LatentAttention | None = None

    def __call__(self, residual: torch.Tensor, space: Workspace, positions: torch.Tensor) -> None:
        """Adds the layer's output to `residual`, BF16 [tokens, hidden]; `positions` int64 [tokens]."""
        tokens, hidden = residual.shape
        projected = space.take("projected", tokens, self.in_proj.rows)
        normed = space.take("normed", tokens, hidden)
        self.in_proj(residual, projected, norm=self.norm, normed=normed)
        gate = space.take("gate", tokens, self.prepare.shape.heads, torch.float32)
        attended = self._attended(projected, normed, positions, gate, space)
        self.out_proj(attended, residual, residual=residual, factors=gate)

    def _attended(
        self,
        projected: torch.Tensor,
        normed: torch.Tensor,
        positions: torch.Tensor,
        gate: torch.Tensor,
        space: Workspace,
    ) -> torch.Tensor:
        """The heads' outputs before their gate, BF16 [tokens, heads * 128]; fills `gate`."""
        tokens, shape, latent = projected.shape[0], self.prepare.shape, self.latent
        if latent is not None and (batch := latent.batch(tokens)) is not None:
            mixed = space.take("mixed", tokens, self.out_proj.gemv.shape.k)
            weights, scale = latent.weights(), latent.scale
            return latent.kernel(
                projected, normed, positions, self.weights, weights, batch, scale, gate, mixed
            )
        width = shape.nope + shape.rope
        inputs = MlaInputs(
            query=space.take("query", tokens, shape.heads * width).view(tokens, shape.heads, width),
            latent=space.take("latent", tokens, shape.latent),
            key=space.take("key", tokens, shape.rope).view(tokens, 1, shape.rope),
            gate=gate,
        )
        self.prepare(projected, normed, positions, self.weights, inputs)
        return self.attend(inputs)


@dataclass(frozen=True)
class MoELayer:
    """Router, routed and shared experts with the norm before them; `weights` is asked at every call (reloads)."""

    norm: Norm
    decoder: MoEDecoder
    weights: Callable[[], MoEWeights]
    scaling: float
    limit: float
    shared_limit: float

    def __call__(self, residual: torch.Tensor, space: Workspace) -> None:
        """Adds the block's output to `residual`, BF16 [tokens, hidden]."""
        self.decoder(
            residual,
            self.weights(),
            residual,
            self.scaling,
            self.limit,
            self.shared_limit,
            residual=residual,
            norm=self.norm,
        )


@dataclass(frozen=True)
class DenseLayer:
    """A SwiGLU MLP with the norm before it."""

    norm: Norm
    up: Projection
    down: Projection

    def __call__(self, residual: torch.Tensor, space: Workspace) -> None:
        """Adds the MLP's output to `residual`, BF16 [tokens, hidden]."""
        gate_up = space.take("gate_up", residual.shape[0], self.up.rows)
        self.up(residual, gate_up, norm=self.norm)
        self.down(gate_up, residual, residual=residual)
