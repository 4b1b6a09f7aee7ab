# SPDX-License-Identifier: Apache-2.0
"""Picks and builds the method of a layer's routed experts, and puts Ling's clamp into stock GPU backends."""

from collections.abc import Callable
from typing import Any, Literal

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from vllm_ling.options import parse_options
from vllm_ling.quant.moe_auto import decide
from vllm_ling.quant.moe_policy import ExpertFormat, MoEFacts, choose_moe, measures
from vllm_ling.quant.moe_torch import TorchMoEMethod
from vllm_ling.status import choose


def moe_method(layer: Any, fmt: ExpertFormat, stock: Callable[[], Any]) -> FusedMoEMethodBase:
    """Method for one `RoutedExperts` layer.

    Args:
        layer: the layer under construction; carries `moe_config` and the SwiGLU limit.
        fmt: how the checkpoint stores its experts.
        stock: builds vLLM's own method for this layer (None means unquantized).
    """
    options = parse_options(get_current_vllm_config().additional_config)
    limit = layer.swiglu_limit
    device: Literal["cpu", "cuda", "other"] = "other"
    if current_platform.is_cpu() or current_platform.is_cuda():
        device = "cpu" if current_platform.is_cpu() else "cuda"
    facts = MoEFacts(fmt, device, limit is not None, layer.moe_config.moe_backend)
    choice: str
    choice, reason = choose_moe(options.moe, facts)
    decodes = fmt == "mxfp4" and device == "cuda" and options.moe == "ling"
    if measures(options.moe, facts):
        from vllm_ling.quant.moe_verdict import verdict_for

        choice, decodes, reason = decide(verdict_for(layer), fallback=reason)
    choose(f"moe {fmt}{' clamped' if limit else ''}", choice, reason)
    if choice in ("torch", "reference"):
        return TorchMoEMethod(layer.moe_config, fmt, limit, dequantize_at_load=choice == "torch")

    # Read by models/moe_block.py: our decode kernel may take over for a few tokens.
    layer.ling_decode = decodes
    method = stock_method(layer, stock, None if choice == "stock" else choice)
    _record_backend(method)
    return method


def stock_method(layer: Any, stock: Callable[[], Any], backend: str | None) -> FusedMoEMethodBase:
    """vLLM's method for `layer` with Ling's clamp, on `backend` or vLLM's own choice.

    Raises:
        LingError: the backend cannot apply the clamp.
    """
    # The limit is ours from here on: left in place, the stock backend would clamp the gate before SiLU.
    limit, layer.swiglu_limit, layer.moe_config.swiglu_limit = layer.swiglu_limit, None, None
    if backend is not None:
        layer.moe_config.moe_backend = backend
    method = stock() or UnquantizedFusedMoEMethod(layer.moe_config)
    if limit is not None:
        from vllm_ling.quant.moe_clamp import clamp_after_silu

        clamp_after_silu(method, limit, layer.layer_name)
    return method


def _record_backend(method: Any) -> None:
    """Notes which backend vLLM's method resolved to: its log line is the only other place that says so."""
    for name in ("mxfp4_backend", "fp8_backend", "wna16_backend", "unquantized_backend"):
        backend = getattr(method, name, None)
        if backend is not None:
            choose("moe backend", str(getattr(backend, "value", backend)), type(method).__name__)
            return
