# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 linear layers on a GPU: few tokens through our GEMV with BF16 activations, more through vLLM's GEMM.

Both read the same weight. The GEMV needs no launch that quantizes activations. When a layer's weights are settled the
two are compared; where they disagree vLLM's GEMM keeps the layer.
"""

import weakref
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ling.quant.fp8_gemv import TOKEN_COUNTS, Fp8Gemv, GemvShape
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.linear_check import BOUND, distance, note, random_tokens
from vllm_ling.quant.moe_decode import block_scales
from vllm_ling.status import choose

# Up to this many tokens the GEMV reads the weights about as fast as memory allows (H200, 20480 x 2560: 15 to 16 us).
MAX_TOKENS = 8
# Tokens that vLLM's GEMM gets for the comparison, at most.
_MOST_COMPARED = 8192

_GEMVS: dict[tuple[GemvShape, int], Fp8Gemv] = {}
# Weak, so that a process that drops a model also drops its weights.
_LAYERS: list["weakref.ref[Any]"] = []


def gemv_for(shape: GemvShape, device: torch.device) -> Fp8Gemv:
    """The compiled kernels for `shape`, shared by all layers of that shape.

    Raises:
        CompileError: with the compiler's log.
        ValueError: the shape or the GPU is not supported.
    """
    key = (shape, device.index or 0)
    if key not in _GEMVS:
        _GEMVS[key] = Fp8Gemv(shape, gpu_of(device), device, default_cache())
    return _GEMVS[key]


def with_decode_kernel(method: Any, config: Any) -> Any:
    """vLLM's method, or ours in its place if it is the block-FP8 one."""
    if type(method) is not Fp8LinearMethod or not method.block_quant:
        return method
    ours = LingFp8LinearMethod(config)
    ours.__dict__.update(method.__dict__)
    # As many tokens as vLLM's profiling run takes: its GEMM is compiled for their number and the matrix's shape
    # (DeepGEMM), and this way nothing is compiled that would not be anyway.
    ours.compared_tokens = min(
        get_current_vllm_config().scheduler_config.max_num_batched_tokens, _MOST_COMPARED
    )
    return ours


class LingFp8LinearMethod(Fp8LinearMethod):
    """vLLM's block-FP8 method with our kernel for few tokens.

    Leaves the layer's scales as `ling_scales`, float32 [ceil(rows / 128), ceil(k / 128)], for the MoE kernel too, and
    in `ling_problem` why our product must not be used on them, or "".
    """

    compared_tokens = MAX_TOKENS
    _gemv: Fp8Gemv | None = None
    _limit = 0
    _handle = -1

    def process_weights_after_loading(self, layer: Any) -> None:
        stored, _ = block_scales(layer)
        first_rows = layer.weight[:128].clone()
        super().process_weights_after_loading(layer)
        scales, reason = block_scales(layer)
        if (
            scales is None
            and stored is not None
            and torch.equal(first_rows.view(torch.uint8), _bytes(layer.weight[:128]))
        ):
            # vLLM has only put the scales into its GEMM's order; the bytes are still those that the stored scales fit.
            scales = stored
        rows, k = layer.weight.shape[0], layer.weight.shape[-1]
        self._gemv, what, layer.ling_problem = None, f"linear {rows} x {k}", ""
        if scales is not None:
            kept = getattr(layer, "ling_scales", None)
            if kept is not None and kept.shape == scales.shape:
                kept.copy_(scales)  # a reload: graphs and the fused path hold this tensor
            else:
                layer.ling_scales = scales
            try:
                self._gemv = gemv_for(GemvShape(rows, k, row_scales=False), layer.weight.device)
            except (RuntimeError, ValueError, ImportError) as error:
                reason = f"{type(error).__name__}: {error}"
        if self._gemv is not None:
            self._limit = min(MAX_TOKENS, self._gemv.max_tokens)
            name = getattr(layer, "prefix", "") or what
            if problem := self._problem(layer, name):
                # Of this layer alone, so that the next one of its shape does not take its place in the record.
                self._gemv, what, reason = None, f"linear {name}", problem
                layer.ling_problem = problem
        if self._gemv is None:
            choose(what, "stock", reason)
            return
        choose(what, "ling", f"up to {self._limit} tokens with BF16 activations, vLLM's GEMM above")
        if self._handle < 0:
            self._handle = len(_LAYERS)
            _LAYERS.append(weakref.ref(layer))

    def _problem(self, layer: Any, name: str) -> str:
        """Why our product cannot stand in for vLLM's on these weights, or ""."""
        assert self._gemv is not None
        try:
            x = random_tokens(
                min(MAX_TOKENS, self.compared_tokens), layer.weight.shape[-1], layer.weight.device
            )
            padded = x.new_zeros(self.compared_tokens, x.shape[1])
            padded[: len(x)] = x
            right = super().apply(layer, padded, None)[: len(x)]
            counts = [count for count in TOKEN_COUNTS if count <= min(self._limit, len(x))]
            away = distance(lambda some: self._product(layer, some), counts, x, right)
        except Exception as error:  # without evidence vLLM's GEMM serves
            return f"not compared with vLLM's GEMM: {type(error).__name__}: {error}"
        note(layer, name, away)
        return "" if away <= BOUND else f"{away:.3f} (relative RMS of 128 rows) away from vLLM's GEMM"

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., k] -> [..., rows]."""
        if self._gemv is None or bias is not None or x.dtype != torch.bfloat16:
            return super().apply(layer, x, bias)
        return torch.ops.vllm.ling_fp8_linear(x, self._handle, layer.weight.shape[0])

    def few_or_many(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """The dispatch by the number of tokens, out of torch.compile's sight."""
        flat = x.reshape(-1, x.shape[-1])
        if self._gemv is None or flat.shape[0] > self._limit or flat.shape[0] == 0:
            return super().apply(layer, x, None)
        return self._product(layer, flat.contiguous()).view(*x.shape[:-1], -1)

    def _product(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        assert self._gemv is not None
        out = torch.empty(x.shape[0], layer.weight.shape[0], dtype=x.dtype, device=x.device)
        return self._gemv(x, layer.weight, layer.ling_scales, out)


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(torch.uint8)


def _fp8_linear(x: torch.Tensor, handle: int, rows: int) -> torch.Tensor:
    layer = _LAYERS[handle]()
    assert layer is not None, "a layer was called after its model was dropped"
    return layer.quant_method.few_or_many(layer, x)


def _fp8_linear_fake(x: torch.Tensor, handle: int, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


direct_register_custom_op("ling_fp8_linear", _fp8_linear, fake_impl=_fp8_linear_fake)
