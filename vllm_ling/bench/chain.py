# SPDX-License-Identifier: Apache-2.0
"""A chain of fused KDA and MoE layers on random weights of flash's shapes, without vLLM: what a layer costs."""

from typing import Any

import torch

from vllm_ling.bench.layers import FLASH, random_fp8, random_moe_layer
from vllm_ling.decode.body import FusedBody, FusedLayer
from vllm_ling.decode.kda_step import KdaBatch, KdaShape, KdaStates, KdaStep, KdaWeights
from vllm_ling.decode.layers import KdaLayer, MoELayer, Projection, Workspace
from vllm_ling.quant.decode_moe import MoEDecoder
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape, Prologue
from vllm_ling.quant.jit import default_cache, gpu_of

KDA = KdaShape(heads=32, hidden=2560)
_WIDE = KDA.heads * 128


class Chain:
    """`layers` KDA + MoE layers for up to 8 tokens; the kernels are compiled once per process."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.device, gpu, cache = device, gpu_of(device), default_cache()
        self._gemvs: dict[GemvShape, Fp8Gemv] = {}
        self._gpu, self._cache = gpu, cache
        self._step = KdaStep(KDA, gpu, cache)
        self._moe = MoEDecoder(FLASH, gpu, device, cache)
        self.space = Workspace(8, device)
        self.layers = [self._layer() for _ in range(layers)]
        self.body = FusedBody(self.layers, self.space)

    def _projection(self, parts: tuple[int, ...], k: int, prologue: Prologue) -> Projection:
        shape = GemvShape(sum(parts), k, False, prologue=prologue, parts=parts)
        if shape not in self._gemvs:
            self._gemvs[shape] = Fp8Gemv(shape, self._gpu, self.device, self._cache)
        weights = [random_fp8(rows, k, self.device) for rows in parts]
        return Projection(self._gemvs[shape], [w for w, _ in weights], [s for _, s in weights])

    def _layer(self) -> FusedLayer:
        norm = torch.ones(FLASH.hidden, device=self.device, dtype=torch.bfloat16)
        conv = torch.zeros(18, 3 * _WIDE, 6, device=self.device, dtype=torch.bfloat16)
        state = torch.zeros(18, KDA.heads, 128, 128, device=self.device, dtype=torch.float32)
        weights = random_moe_layer(FLASH, self.device)
        kda = KdaLayer(
            "kda",
            (norm, 1e-6),
            self._projection((3 * _WIDE, _WIDE, _WIDE), FLASH.hidden, "norm"),
            self._step,
            random_kda(KDA, self.device),
            lambda: KdaStates(conv, state),
            self._projection((FLASH.hidden,), _WIDE, "none"),
        )
        return FusedLayer(kda, MoELayer((norm, 1e-6), self._moe, lambda: weights, 2.5, 0.0, 0.0))

    def batch(self, tokens: int) -> dict[str, KdaBatch]:
        """One sequence, the same for all layers: a plain decode, or a verification of `tokens` tokens."""
        integers: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        if tokens == 1:
            return {"kda": KdaBatch(torch.ones(1, **integers))}
        slots = torch.arange(1, tokens + 1, **integers)[None]
        starts = torch.tensor([0, tokens], **integers)
        return {"kda": KdaBatch(slots, starts, torch.ones(1, **integers), tokens)}


def random_kda(shape: KdaShape, device: torch.device) -> KdaWeights:
    """A layer's small weights; decays between those of one token and of hundreds."""
    wide = shape.heads * 128

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32) * scale

    return KdaWeights(
        b=normal(shape.heads, shape.hidden, scale=0.02).bfloat16(),
        q_conv=normal(wide, 4, scale=0.5),
        k_conv=normal(wide, 4, scale=0.5),
        v_conv=normal(wide, 4, scale=0.5),
        a_log=normal(shape.heads, scale=0.5),
        dt_bias=normal(wide) - 3,
        o_norm=(1 + normal(128, scale=0.1)).bfloat16(),
        eps=1e-6,
        lower_bound=-5.0,
    )
