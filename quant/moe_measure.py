# SPDX-License-Identifier: Apache-2.0
"""Times MoE blocks of one model's shape on random weights: vLLM's block with each backend, and our decode kernel.

A block is what the model has: router, experts and shared expert, built by vLLM's own classes and timed from hidden
states to combined output, since our kernel does all of it in one launch. Nothing of it outlives the measurement: the
blocks live in copies of the configuration, their memory is given back, and the log names none of them.
"""

import contextlib
import copy
import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import vllm.logger
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3MoE
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_ling.bench.timing import time_graph
from vllm_ling.quant.decode_moe import MoEDecoder, MoEShape
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.moe import stock_method
from vllm_ling.quant.moe_auto import BUDGET_S, WEIGHTS, Clock, LeftOut
from vllm_ling.quant.moe_decode import decode_shape, decode_weights

# Inputs in rotation: their experts together are far larger than any L2 cache.
_INPUTS = 12
# Names of backends that quantize activations, which would make another model (W4A8).
_8_BIT_ACTIVATIONS = ("MXFP8", "_FP8", "MXFP4_MXFP4")


class Bench:
    """Builds and times the candidates of `moe_auto.survey`, one after the other."""

    def __init__(
        self, config: VllmConfig, layer: Any, shape: MoEShape, device: torch.device, clock: Clock
    ) -> None:
        """`layer` is the `RoutedExperts` under construction; `config` that of the model it belongs to."""
        self._config, self._layer, self._shape = config, layer, shape
        self._device, self._clock = device, clock
        self._own, self._built, self._blocks = config, "", list[Any]()
        self.layers = 0

    def run(self, backend: str) -> dict[int, float]:
        """Microseconds a block by tokens.

        Raises:
            LeftOut: with the reason why this backend cannot be measured.
            Exception: whatever vLLM or a kernel raises.
        """
        self._build("humming" if backend == "ling" else backend)
        calls_for = self._ling_calls if backend == "ling" else self._stock_calls
        us = {}
        with set_current_vllm_config(self._own), set_forward_context(None, self._own), torch.no_grad():
            for tokens in WEIGHTS:
                generator = torch.Generator(self._device).manual_seed(tokens)
                size = (_INPUTS, tokens, self._shape.hidden)
                xs = torch.randn(size, generator=generator, device=self._device, dtype=torch.float32)
                with self._clock.warm_up():
                    calls = calls_for(xs.bfloat16().unbind())
                    for call in calls:
                        call()
                    torch.cuda.synchronize(self._device)
                us[tokens] = time_graph(calls, rounds=2).us
        return us

    def close(self) -> None:
        """Gives all memory back."""
        self._built, self._own, self._blocks = "", self._config, []
        gc.collect()
        torch.cuda.empty_cache()

    def _stock_calls(self, xs: tuple[torch.Tensor, ...]) -> list[Callable[[], object]]:
        return [partial(self._blocks[i % len(self._blocks)].forward, x) for i, x in enumerate(xs)]

    def _ling_calls(self, xs: tuple[torch.Tensor, ...]) -> list[Callable[[], object]]:
        config = self._config.model_config.hf_config
        for block in self._blocks:
            block.ling_groups = (config.n_group, config.topk_group)
        shape, reason = decode_shape(self._blocks[0])
        if shape is None:
            raise LeftOut(reason)
        weights = []
        for block in self._blocks:
            found, reason = decode_weights(block, shape)
            if found is None:
                raise LeftOut(reason)
            weights.append(found)
        decoder = MoEDecoder(shape, gpu_of(self._device), self._device, default_cache())
        block = self._blocks[0]
        factors = (
            block.routed_scaling_factor,
            block.expert_swiglu_limit or 0.0,
            block.share_expert_swiglu_limit or 0.0,
        )
        return [
            partial(decoder, x, weights[i % len(weights)], torch.empty_like(x), *factors)
            for i, x in enumerate(xs)
        ]

    def _build(self, backend: str) -> None:
        if self._built == backend:
            return
        self.close()
        wanted, self._own = self._wanted(), own_config(self._config)
        quant, until = with_backend(self._layer.quant_config, backend), self._clock.spent + BUDGET_S / 4
        for index in range(wanted):
            if index and self._clock.spent >= until:
                break
            with self._clock.warm_up() if index == 0 else contextlib.nullcontext():
                self._blocks.append(self._block(index, quant))
                torch.cuda.synchronize(self._device)
        self._built = backend
        self.layers = max(self.layers, len(self._blocks))

    def _block(self, index: int, quant: Any) -> Any:
        model = self._config.model_config
        # Other layers' names differ in their number only, which the checkpoint's list of exclusions may look at.
        stem = re.sub(r"\d+", str(index), self._layer.layer_name.removesuffix(".experts"), count=1)
        with (
            _tried_only(),
            set_current_vllm_config(self._own),
            set_default_torch_dtype(model.dtype),
            self._device,
            torch.no_grad(),
        ):
            block = BailingMoeV3MoE(model.hf_config, quant, clamped_layer(model.hf_config), stem)
            found: Any = block.experts.routed_experts.quant_method
            name = str(found.mxfp4_backend.value)
            if any(mark in name for mark in _8_BIT_ACTIVATIONS):
                raise LeftOut(f"vLLM takes {name}, which rounds activations to 8 bits (W4A8)")
            fill(block, torch.Generator(self._device).manual_seed(index))
            process_weights_after_loading(block, model, self._device)
        return block

    def _wanted(self) -> int:
        """Layers to rotate over: what every call reads (router, shared expert) must leave the L2 cache in between."""
        s = self._shape
        expert = 3 * s.intermediate * s.hidden * 17 // 32  # 4 bits and an 8-bit scale per 32
        layer, call = (
            s.experts * expert,
            s.top_k * expert + 4 * s.experts * s.hidden + 3 * s.shared * s.hidden,
        )
        cache = torch.cuda.get_device_properties(self._device).L2_cache_size
        free = torch.cuda.mem_get_info(self._device)[0]
        # Repacking holds two more copies of a layer for a moment.
        fit = int(0.9 * free) // layer - 2
        if fit < 1:
            raise LeftOut(
                f"a layer with its repacking takes {3 * layer >> 20} MiB, {free >> 20} MiB are free",
                lasting=False,
            )
        return max(1, min(fit, max(2, -(-2 * cache // call)), _INPUTS))


def clamped_layer(config: Any) -> int:
    """A MoE layer with the model's SwiGLU clamp if there is one: a backend that is chosen must manage all layers."""
    first = int(getattr(config, "first_k_dense_replace", 0) or 0)
    limits = list(getattr(config, "expert_swiglu_limit_list", None) or [])
    return next((index for index in range(first, len(limits)) if limits[index]), first)


def own_config(config: VllmConfig) -> VllmConfig:
    """A copy in which layers can be registered without the server's model seeing them."""
    own, compilation = copy.copy(config), copy.copy(config.compilation_config)
    compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
    # Otherwise vLLM finds layers by the order in which they are called, each once per forward pass.
    compilation.fast_moe_cold_start = False
    # Blocks run eagerly here, where the plain torch forms that inductor would fuse cost a launch for every step.
    compilation.custom_ops = ["all"]
    own.compilation_config = compilation
    return own


def with_backend(quant_config: Any, backend: str) -> Any:
    """A copy of the model's quantization config whose experts take `backend`."""
    own = copy.copy(quant_config)

    def get_quant_method(layer: Any, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return stock_method(layer, lambda: Mxfp4MoEMethod(layer.moe_config), backend)
        return type(quant_config).get_quant_method(own, layer, prefix)

    own.get_quant_method = get_quant_method
    return own


def fill(block: Any, generator: torch.Generator) -> None:
    """Random weights and harmless scales for every parameter of an unprocessed block."""
    for name, parameter in block.named_parameters():
        data, scale = parameter.data, "scale" in name
        if data.dtype == torch.uint8:
            data.random_(*((117, 122) if scale else (0, 256)), generator=generator)
        elif data.dtype == torch.float8_e8m0fnu:
            data.view(torch.uint8).fill_(117)
        elif data.dtype == torch.float8_e4m3fn:
            codes = torch.randn(data.shape, generator=generator, device=data.device, dtype=torch.float32)
            data.copy_((codes * 40).to(torch.float8_e4m3fn))
        elif scale:
            data.fill_(2.0**-10)
        else:
            data.normal_(0, 0.02, generator=generator)


@contextlib.contextmanager
def _tried_only() -> Iterator[None]:
    """Drops vLLM's once-per-process lines about MoE backends: those who read the log take them for what serves."""
    plain = getattr(vllm.logger, "_print_info_once", None)
    if plain is None:
        yield
        return

    def without_experts(logger: Any, *line: Any) -> None:
        if not logger.name.startswith("vllm.model_executor.layers.fused_moe"):
            plain(logger, *line)

    vllm.logger._print_info_once = without_experts
    try:
        yield
    finally:
        vllm.logger._print_info_once = plain
