# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 linear layers on a GPU: few tokens through our GEMV with BF16 activations, more through vLLM's GEMM.

Both read the same weight. The GEMV needs no launch that quantizes activations.
"""

import weakref
from typing import Any

import torch
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.moe_decode import block_scales
from vllm_ling.status import choose

# Up to this many tokens the GEMV reads the weights about as fast as memory allows (H200, 20480 x 2560: 15 to 16 us).
MAX_TOKENS = 8

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
    return ours


class LingFp8LinearMethod(Fp8LinearMethod):
    """vLLM's block-FP8 method with our kernel for few tokens.

    Leaves the layer's scales as `ling_scales`, float32 [ceil(rows / 128), ceil(k / 128)], for the MoE kernel too.
    """

    _gemv: Fp8Gemv | None = None
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
        if self._gemv is None:
            choose(f"linear {rows} x {k}", "stock", reason)
            return
        choose(
            f"linear {rows} x {k}",
            "ling",
            f"up to {MAX_TOKENS} tokens with BF16 activations, vLLM's GEMM above",
        )
        if self._handle < 0:
            self._handle = len(_LAYERS)
            _LAYERS.append(weakref.ref(layer))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., k] -> [..., rows]."""
        if self._gemv is None or bias is not None or x.dtype != torch.bfloat16:
            return super().apply(layer, x, bias)
        return torch.ops.vllm.ling_fp8_linear(x, self._handle, layer.weight.shape[0])

    def few_or_many(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """The dispatch by the number of tokens, out of torch.compile's sight."""
        flat = x.reshape(-1, x.shape[-1])
        # A small card may have no room for as many rows of a wide input.
        if self._gemv is None or not 0 < flat.shape[0] <= min(MAX_TOKENS, self._gemv.max_tokens):
            return super().apply(layer, x, None)
        out = torch.empty(flat.shape[0], layer.weight.shape[0], dtype=x.dtype, device=x.device)
        return self._gemv(flat.contiguous(), layer.weight, layer.ling_scales, out).view(*x.shape[:-1], -1)


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(torch.uint8)


def _fp8_linear(x: torch.Tensor, handle: int, rows: int) -> torch.Tensor:
    layer = _LAYERS[handle]()
    assert layer is not None, "a layer was called after its model was dropped"
    return layer.quant_method.few_or_many(layer, x)


def _fp8_linear_fake(x: torch.Tensor, handle: int, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


direct_register_custom_op("ling_fp8_linear", _fp8_linear, fake_impl=_fp8_linear_fake)
