# SPDX-License-Identifier: Apache-2.0
"""Picks the method of an output head: the target's by policy, the draft's never (it has no weights of its own)."""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from vllm_ling.checkpoint.headers import read_headers
from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.decode.policy import one_gpu
from vllm_ling.options import parse_options
from vllm_ling.quant.head_bf16 import HeadBf16Method
from vllm_ling.quant.head_fp8 import HeadFp8Method
from vllm_ling.quant.head_policy import HeadFacts, choose_head
from vllm_ling.quant.linear_policy import LinearChoice, choose_linear
from vllm_ling.spec_decode.shared_head import UnboundHeadMethod
from vllm_ling.status import choose


def head_method(layer: ParallelLMHead, prefix: str, vllm_config: VllmConfig) -> QuantizeMethodBase:
    """Method for the head at `prefix`; records the choice and its reason."""
    if prefix.endswith("shared_head.head"):
        return UnboundHeadMethod()
    options = parse_options(vllm_config.additional_config)
    choice, reason = choose_head(options, head_facts(vllm_config))
    choose("lm_head", choice, reason)
    if choice == "bf16":
        return HeadBf16Method()
    return HeadFp8Method(
        choice,
        options.on_probe,
        dummy=vllm_config.load_config.load_format == "dummy",
        decode_kernel=linear_choice(vllm_config)[0] == "ling",
    )


def linear_choice(vllm_config: VllmConfig) -> tuple[LinearChoice, str]:
    """Whose kernel the FP8 head and the projections take for few tokens, and why."""
    return choose_linear(
        parse_options(vllm_config.additional_config).linear,
        nvidia=current_platform.is_cuda(),
        one_gpu=one_gpu(vllm_config.parallel_config),
    )


def head_facts(vllm_config: VllmConfig) -> HeadFacts:
    """Collects what the policy needs from vLLM's configuration and the checkpoint's headers."""
    model = vllm_config.model_config
    speculative: Any = vllm_config.speculative_config
    return HeadFacts(
        # Random weights need no files.
        stored="unknown" if vllm_config.load_config.load_format == "dummy" else _stored_head(model.model),
        checkpoint_quantized=getattr(model.hf_config, "quantization_config", None) is not None,
        quantization_ling=model.quantization == "ling",
        model_dtype=str(model.dtype).removeprefix("torch."),
        head_dtype=str(model.head_dtype).removeprefix("torch."),
        tied=bool(getattr(model.hf_config, "tie_word_embeddings", False)),
        lora=vllm_config.lora_config is not None,
        # Absent before vLLM 0.33.
        draft_quantization=getattr(speculative, "draft_lm_head_quantization", None),
    )


def _stored_head(model: str) -> Any:
    folder = resolve_model(model)
    if folder is None:
        return "unknown"
    headers = read_headers(folder)
    head = headers.get("lm_head.weight")
    if head is None or not head.dtype.startswith("F8"):
        return "bf16"
    if "lm_head.weight_scale" in headers:
        return "fp8_row"
    return "fp8_block" if "lm_head.weight_scale_inv" in headers else "fp8_noscale"
