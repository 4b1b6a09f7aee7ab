# SPDX-License-Identifier: Apache-2.0
"""Head, expert and projection policies as tables: what is chosen, and what is refused with which words."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest

from vllm_ling.errors import LingError
from vllm_ling.options import LingOptions
from vllm_ling.quant import head
from vllm_ling.quant.head_policy import HeadFacts, choose_head
from vllm_ling.quant.linear_policy import choose_linear
from vllm_ling.quant.moe_policy import MoEFacts, choose_moe

FP4 = HeadFacts(
    stored="bf16",
    checkpoint_quantized=True,
    quantization_ling=True,
    model_dtype="bfloat16",
    head_dtype="bfloat16",
    tied=False,
    lora=False,
    draft_quantization=None,
)
BF16 = replace(FP4, checkpoint_quantized=False, quantization_ling=False)


@pytest.mark.parametrize(
    ("option", "facts", "expected"),
    [
        ("auto", FP4, "fp8_online"),
        ("fp8", FP4, "fp8_online"),
        ("bf16", FP4, "bf16"),
        ("auto", BF16, "bf16"),
        ("auto", replace(BF16, quantization_ling=True), "fp8_online"),
        ("auto", replace(FP4, stored="fp8_row"), "fp8_row"),
        ("fp8", replace(FP4, stored="fp8_block"), "fp8_block"),
        ("auto", replace(FP4, head_dtype="float32"), "bf16"),
        ("auto", replace(FP4, lora=True), "bf16"),
        ("auto", replace(FP4, draft_quantization="fp8"), "bf16"),
        ("auto", replace(FP4, stored="unknown"), "fp8_online"),
    ],
)
def test_head_choice(option: str, facts: HeadFacts, expected: str) -> None:
    choice, reason = choose_head(LingOptions.model_validate({"lm_head": option}), facts)
    assert choice == expected and reason


@pytest.mark.parametrize(
    ("option", "facts", "word"),
    [
        ("auto", replace(FP4, tied=True), "tie_word_embeddings"),
        ("auto", replace(FP4, stored="fp8_noscale"), "lm_head.weight_scale"),
        ("bf16", replace(FP4, stored="fp8_row"), "ling.lm_head=bf16"),
        ("auto", replace(FP4, stored="fp8_row", head_dtype="float32"), "head_dtype=float32"),
        ("fp8", BF16, "--quantization ling"),
        ("fp8", replace(FP4, head_dtype="float32"), "head_dtype=float32"),
        ("fp8", replace(FP4, lora=True), "LoRA"),
        ("fp8", replace(FP4, draft_quantization="nvfp4"), "draft_lm_head_quantization=nvfp4"),
    ],
)
def test_head_refusals_name_the_cause(option: str, facts: HeadFacts, word: str) -> None:
    with pytest.raises(LingError, match=word):
        choose_head(LingOptions.model_validate({"lm_head": option}), facts)


@pytest.mark.parametrize(
    ("option", "facts", "expected"),
    [
        ("auto", MoEFacts("mxfp4", "cpu", False, "auto"), "torch"),
        ("ling", MoEFacts("int4", "cpu", True, "auto"), "torch"),
        ("reference", MoEFacts("mxfp4", "cpu", True, "auto"), "reference"),
        ("reference", MoEFacts("mxfp4", "cuda", True, "auto"), "reference"),
        ("auto", MoEFacts("mxfp4", "cuda", True, "auto"), "stock"),
        ("stock", MoEFacts("mxfp4", "cuda", True, "auto"), "stock"),
        ("stock", MoEFacts("fp8", "cuda", True, "auto"), "triton"),
        ("stock", MoEFacts("mxfp4", "cpu", True, "auto"), "torch"),
        ("auto", MoEFacts("fp8", "cuda", True, "auto"), "triton"),
        ("auto", MoEFacts("fp8", "cuda", True, "marlin"), "stock"),
        ("auto", MoEFacts("fp8", "cuda", False, "auto"), "stock"),
        ("humming", MoEFacts("mxfp4", "cuda", False, "auto"), "humming"),
        ("marlin", MoEFacts("mxfp4", "cuda", False, "marlin"), "marlin"),
        ("ling", MoEFacts("mxfp4", "cuda", True, "auto"), "humming"),
        ("ling", MoEFacts("mxfp4", "cuda", False, "humming"), "humming"),
    ],
)
def test_moe_choice(option: str, facts: MoEFacts, expected: str) -> None:
    choice, reason = choose_moe(option, facts)
    assert choice == expected and reason


@pytest.mark.parametrize(
    ("option", "facts", "word"),
    [
        ("humming", MoEFacts("mxfp4", "cpu", False, "auto"), "needs an NVIDIA GPU"),
        ("marlin", MoEFacts("fp8", "cuda", False, "auto"), "experts are fp8"),
        ("humming", MoEFacts("mxfp4", "cuda", False, "marlin"), "--moe-backend marlin"),
        ("ling", MoEFacts("int4", "cuda", False, "auto"), "experts are int4"),
        ("ling", MoEFacts("mxfp4", "cuda", False, "marlin"), "--moe-backend marlin"),
        ("ling", MoEFacts("mxfp4", "other", False, "auto"), "needs an NVIDIA GPU"),
    ],
)
def test_moe_refusals_name_the_cause(option: str, facts: MoEFacts, word: str) -> None:
    with pytest.raises(LingError, match=word):
        choose_moe(option, facts)


# (option, NVIDIA, one GPU) -> choice and how the reason begins; doctor takes the reasons of auto and stock as meant.
LINEAR = {
    ("auto", True, True): ("ling", "ling.linear=auto: our kernel"),
    ("auto", True, False): ("stock", "ling.linear=auto: measured on one GPU only"),
    ("auto", False, True): ("stock", "ling.linear=auto: the kernel needs an NVIDIA GPU"),
    ("auto", False, False): ("stock", "ling.linear=auto: the kernel needs an NVIDIA GPU"),
    ("ling", True, True): ("ling", "ling.linear=ling: our kernel"),
    ("ling", True, False): ("ling", "ling.linear=ling: our kernel"),
    ("ling", False, True): ("stock", "ling.linear=ling: the kernel needs an NVIDIA GPU"),
    ("ling", False, False): ("stock", "ling.linear=ling: the kernel needs an NVIDIA GPU"),
    ("stock", True, True): ("stock", "ling.linear=stock"),
    ("stock", True, False): ("stock", "ling.linear=stock"),
    ("stock", False, True): ("stock", "ling.linear=stock"),
    ("stock", False, False): ("stock", "ling.linear=stock"),
}


def test_the_table_of_projections_is_complete() -> None:
    options = get_args(LingOptions.model_fields["linear"].annotation)
    assert set(LINEAR) == set(itertools.product(options, (True, False), (True, False)))


@pytest.mark.parametrize(("case", "expected"), LINEAR.items())
def test_linear_choice(
    case: tuple[str, bool, bool], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, nvidia, one_gpu = case
    choice, reason = choose_linear(option, nvidia=nvidia, one_gpu=one_gpu)
    assert choice == expected[0] and reason.startswith(expected[1])
    # The same from vLLM's configuration and platform; ranks of any kind are more than one GPU.
    monkeypatch.setattr(head, "current_platform", SimpleNamespace(is_cuda=lambda: nvidia))
    kinds = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    for kind in kinds:
        parallel = SimpleNamespace(**(dict.fromkeys(kinds, 1) | {kind: 1 if one_gpu else 2}))
        config = SimpleNamespace(additional_config={"ling": {"linear": option}}, parallel_config=parallel)
        assert head.linear_choice(config) == (choice, reason)


def test_the_projections_are_ours_on_one_gpu_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
    config = SimpleNamespace(additional_config={}, parallel_config=parallel)
    assert head.linear_choice(config)[0] == "ling"
