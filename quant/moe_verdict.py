# SPDX-License-Identifier: Apache-2.0
"""The verdict of `ling.moe=auto` for the model under construction: from this process, the cache, or a measurement."""

import importlib.metadata
import os
from dataclasses import asdict, replace
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config

from vllm_ling.compat import installed_vllm
from vllm_ling.quant.decode_moe import TOKEN_COUNTS, MoEShape, defines, plan, unsupported
from vllm_ling.quant.head import linear_choice
from vllm_ling.quant.jit import Gpu, default_cache, gpu_of, kernel_key
from vllm_ling.quant.moe_auto import (
    AutoFacts,
    Clock,
    Verdict,
    describe,
    load,
    not_measured,
    store,
    survey,
    table,
    verdict_key,
)
from vllm_ling.status import info

# vLLM's switches between kernels of the same backend; those of the first kind ask for 8-bit activations.
_ACTIVATIONS = ("VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_MARLIN_INPUT_DTYPE")
_SWITCHES = (
    "VLLM_HUMMING_",
    "VLLM_MARLIN_",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_DISABLE_SHARED_EXPERTS",
    "VLLM_SHARED_EXPERTS",
)

# All layers of a process share one verdict, a draft's included.
_VERDICTS: dict[str, Verdict] = {}


def verdict_for(layer: Any) -> Verdict:
    """The verdict for the `RoutedExperts` layer under construction, on the current device. Never raises."""
    try:
        config = get_current_vllm_config()
        facts, shape = auto_facts(config, layer), moe_shape(config.model_config.hf_config)
        if note := not_measured(facts):
            return Verdict((), note=note)
        device = torch.device("cuda", torch.cuda.current_device())
        key = verdict_key(key_facts(config, shape, device))
        if key not in _VERDICTS:
            try:
                _VERDICTS[key] = load(default_cache(), key) or _measure(
                    config, layer, shape, facts, device, key
                )
                for line in table(_VERDICTS[key]):
                    info(line)
            except Exception as error:  # kept, as the layers to come would only fail again
                _VERDICTS[key] = _failed(error)
        return _VERDICTS[key]
    except Exception as error:  # auto must not stop a server that vLLM's own choice would serve
        return _failed(error)


def _failed(error: Exception) -> Verdict:
    return Verdict((), note=f"the measurement failed: {describe(error)}")


def _measure(
    config: VllmConfig, layer: Any, shape: MoEShape, facts: AutoFacts, device: torch.device, key: str
) -> Verdict:
    from vllm_ling.quant.moe_measure import Bench

    info("moe auto: measuring the experts' backends (some seconds; longer where kernels are compiled first)")
    clock = Clock()
    bench = Bench(config, layer, shape, device, clock)
    try:
        verdict = survey(bench.run, facts, clock)
    finally:
        bench.close()
    return store(default_cache(), key, replace(verdict, layers=bench.layers))


def moe_shape(hf_config: Any) -> MoEShape:
    """The block of a model that one GPU serves."""
    return MoEShape(
        hidden=hf_config.hidden_size,
        intermediate=hf_config.moe_intermediate_size,
        experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        groups=hf_config.n_group,
        top_groups=hf_config.topk_group,
        shared_intermediate=hf_config.moe_shared_expert_intermediate_size * hf_config.num_shared_experts,
    )


def auto_facts(config: VllmConfig, layer: Any) -> AutoFacts:
    """What stands against measuring this layer."""
    parallel = layer.moe_config.moe_parallel_config
    ranks = parallel.tp_size * parallel.dp_size * getattr(parallel, "pcp_size", 1)
    model = config.model_config
    asked = next((name for name in _ACTIVATIONS if os.environ.get(name)), "")
    if (
        getattr(getattr(getattr(model, "quantization_config", None), "moe", None), "activation", None)
        is not None
    ):
        asked = "--quantization-config"
    problem = unsupported(moe_shape(model.hf_config)) or ""
    if model.dtype != torch.bfloat16:
        problem = f"our kernel takes bfloat16, the model runs in {str(model.dtype).removeprefix('torch.')}"
    return AutoFacts(
        max(ranks, getattr(parallel, "ep_size", 1)),
        bool(getattr(model, "enable_sleep_mode", False)),
        asked,
        problem,
    )


def key_facts(config: VllmConfig, shape: MoEShape, device: torch.device) -> dict[str, Any]:
    """Everything that the figures depend on."""
    gpu, hf_config = gpu_of(device), config.model_config.hf_config
    return {
        "gpu": [torch.cuda.get_device_properties(device).name, *asdict(gpu).values()],
        "shape": asdict(shape),
        "clamped": any(getattr(hf_config, "expert_swiglu_limit_list", None) or []),
        "dtype": str(config.model_config.dtype),
        "lora": config.lora_config is not None,
        "linear": linear_choice(config)[0],
        "versions": [installed_vllm(), torch.__version__, _version("humming-kernels")],
        "kernels": _kernels(shape, gpu),
        "switches": {name: value for name, value in os.environ.items() if name.startswith(_SWITCHES)},
    }


def _kernels(shape: MoEShape, gpu: Gpu) -> list[str]:
    if unsupported(shape):
        return []
    plans = [plan(shape, tokens, gpu) for tokens in TOKEN_COUNTS]
    try:
        return [kernel_key("moe_block.cu", defines(shape, p, pdl=True), gpu.arch) for p in plans if p]
    except ImportError as error:  # no NVRTC: the kernel is then left out, with this reason
        return [str(error)]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
