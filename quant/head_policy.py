# SPDX-License-Identifier: Apache-2.0
"""Decides how the output head is stored and computed. Pure policy: no tensors, no kernels, no logging."""

from dataclasses import dataclass
from typing import Literal

from vllm_ling.errors import LingError
from vllm_ling.options import LingOptions

HeadChoice = Literal["bf16", "fp8_online", "fp8_row", "fp8_block"]


@dataclass(frozen=True)
class HeadFacts:
    """What the decision rests on."""

    stored: Literal["unknown", "bf16", "fp8_row", "fp8_block", "fp8_noscale"]
    checkpoint_quantized: bool
    quantization_ling: bool
    model_dtype: str
    head_dtype: str
    tied: bool
    lora: bool
    draft_quantization: str | None


def choose_head(options: LingOptions, facts: HeadFacts) -> tuple[HeadChoice, str]:
    """Returns (choice, reason).

    Raises:
        LingError: if the checkpoint cannot be served or an explicit `lm_head` option cannot be honoured.
    """
    if facts.tied:
        raise LingError(
            "config.json: tie_word_embeddings is true, but Ling's head is untied; a tied head cannot be served"
        )
    if facts.stored == "fp8_noscale":
        raise LingError(
            "lm_head.weight is FP8 but the checkpoint has neither lm_head.weight_scale nor _scale_inv"
        )
    if facts.stored in ("fp8_row", "fp8_block"):
        if options.lm_head == "bf16":
            raise LingError("ling.lm_head=bf16: the checkpoint stores an FP8 head; use lm_head=auto or fp8")
        if facts.head_dtype != facts.model_dtype:
            raise LingError(_head_dtype_message(facts))
        return facts.stored, "the checkpoint stores an FP8 head"
    if options.lm_head == "bf16":
        return "bf16", "ling.lm_head=bf16"

    obstacle = _obstacle(facts)
    if options.lm_head == "fp8":
        if obstacle is not None:
            raise LingError(f"ling.lm_head=fp8: {obstacle}")
        return "fp8_online", "ling.lm_head=fp8"
    if obstacle is not None:
        return "bf16", obstacle
    return "fp8_online", "auto: halves the bytes that every token reads for the head"


def _obstacle(facts: HeadFacts) -> str | None:
    if not facts.checkpoint_quantized and not facts.quantization_ling:
        return "a BF16 checkpoint keeps its BF16 head unless --quantization ling is given"
    if facts.head_dtype != facts.model_dtype:
        return _head_dtype_message(facts)
    if facts.lora:
        return (
            "LoRA adapters may target the head, and an FP8 head cannot take them; start without --enable-lora"
        )
    if facts.draft_quantization is not None:
        return (
            f"speculative_config.draft_lm_head_quantization={facts.draft_quantization} copies an unquantized target "
            "head; leave it out, the draft shares the FP8 head itself"
        )
    return None


def _head_dtype_message(facts: HeadFacts) -> str:
    return (
        f"head_dtype={facts.head_dtype} differs from the model dtype {facts.model_dtype}, which vLLM supports for an "
        "unquantized head only; drop the head_dtype override"
    )
