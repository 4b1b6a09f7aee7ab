# SPDX-License-Identifier: Apache-2.0
"""User options: the `ling` section of vLLM's `--additional-config`, validated by name."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_ling.errors import LingError


class LingOptions(BaseModel):
    """What a user may choose; every field has a default that suits one user on one box."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lm_head: Literal["auto", "bf16", "fp8"] = Field(
        "auto",
        description="Output head; fp8 quantizes a BF16 head while loading, auto means fp8 unless forbidden.",
    )
    moe: Literal["auto", "ling", "humming", "marlin", "stock", "reference"] = Field(
        "auto",
        description="Backend of the routed MXFP4 experts. On a GPU auto times them at load and stock is vLLM's choice; "
        "ling decodes up to 8 tokens with our kernel and leaves the rest to Humming.",
    )
    linear: Literal["auto", "ling", "stock"] = Field(
        "auto",
        description="Block-FP8 projections and the FP8 head on a GPU: ling is our kernel for few tokens and vLLM's "
        "GEMM above, stock vLLM's GEMM always; auto is ling on one NVIDIA GPU.",
    )
    decode: Literal["auto", "fused", "layers"] = Field(
        "auto",
        description="Decode steps of a few tokens on a GPU: fused runs them through our kernels from norm to norm, "
        "layers through vLLM's modules; auto is fused where moe and linear are ours and the model's shapes fit.",
    )
    draft_vocab: str | None = Field(
        None,
        description="File of vllm-ling draft-vocab: the tokens that MTP may draft. It then reads fewer rows of "
        "the head; the output stays the same.",
    )
    draft_gate: Literal["off", "bytes", "times"] = Field(
        "off",
        description="Draft and verify only tokens that are expected to pay, at most num_speculative_tokens: bytes "
        "judges by the byte model, times also by the step times that it measures while serving. Without "
        "asynchronous scheduling.",
    )
    on_fault: Literal["fail", "warn"] = Field(
        "fail",
        description="What to do when a proof at load finds a broken set-up: stop, or log FAULT and carry on.",
    )
    on_probe: Literal["fail", "bf16"] = Field(
        "fail", description="What to do when the FP8 head drifts from the BF16 head beyond the bounds."
    )
    inject_fault: Literal["none", "head_bytes", "head_scale"] = Field(
        "none",
        description="Breaks the draft head on purpose, for the demo and the tests: head_bytes reads FP8 storage as "
        "BF16, head_scale casts FP8 to BF16 without its scale.",
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> "LingOptions":
        if self.inject_fault != "none" and self.lm_head == "bf16":
            raise ValueError(f"inject_fault={self.inject_fault} needs an FP8 head, but lm_head=bf16")
        if self.inject_fault != "none" and self.draft_vocab is not None:
            raise ValueError(
                f"inject_fault={self.inject_fault} breaks the whole draft head; leave draft_vocab out"
            )
        if self.on_probe != "fail" and self.lm_head == "bf16":
            raise ValueError(f"on_probe={self.on_probe} judges an FP8 head, but lm_head=bf16")
        return self


def parse_options(additional_config: Mapping[str, Any] | None) -> LingOptions:
    """Validates the `ling` section of an additional-config mapping.

    Raises:
        LingError: naming every unknown key, bad value or contradiction.
    """
    section = (additional_config or {}).get("ling", {})
    if not isinstance(section, Mapping):
        raise LingError(f"--additional-config: 'ling' must be an object of options, got {section!r}")
    try:
        return LingOptions.model_validate(dict(section))
    except ValidationError as error:
        raise LingError("--additional-config: " + "; ".join(map(_describe, error.errors()))) from None


def _describe(error: Any) -> str:
    name = ".".join(["ling", *map(str, error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"unknown option {name} (known: {', '.join(LingOptions.model_fields)})"
    if error["type"] == "literal_error":
        return f"{name}={error['input']!r} is not one of {error['ctx']['expected']}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"
