# SPDX-License-Identifier: Apache-2.0
"""Head and expert policies as tables: what is chosen, and what is refused with which words."""

from dataclasses import replace

import pytest

from vllm_ling.errors import LingError
from vllm_ling.options import LingOptions
from vllm_ling.quant.head_policy import HeadFacts, choose_head
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
