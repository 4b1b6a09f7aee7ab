# SPDX-License-Identifier: Apache-2.0
"""Which kernels the fused path of a model will ask for, from its config: what `from_vllm` forms of loaded modules."""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.decode import kda_step, mla_prepare
from vllm_ling.decode.kda_step import KdaShape
from vllm_ling.decode.mla_prepare import MlaShape
from vllm_ling.quant import fp8_gemv
from vllm_ling.quant.fp8_gemv import GemvShape, Prologue

_KDA = ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "o_proj")
_MLA = ("q_proj", "kv_a_proj_with_mqa", "dense")


@dataclass(frozen=True)
class FusedShapes:
    """One shape for each kernel to compile."""

    gemv: tuple[GemvShape, ...]
    kda: KdaShape
    mla: MlaShape


def fused_shapes(shape: LingShape) -> FusedShapes:
    """The shapes on one GPU, target and draft. A config with kda_safe_gate false is none that was published."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    wide = heads * shape.head_dim
    kda = KdaShape(heads, hidden)
    mla = MlaShape(heads, hidden, shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.kv_lora_rank)
    asked: list[tuple[tuple[int, ...], int, Prologue]] = [
        ((3 * wide, wide, wide), hidden, "norm"),  # q, k, v; f; g of KDA
        ((hidden,), wide, "none"),  # its o
        (mla.projected, hidden, "norm"),
        ((hidden,), heads * shape.v_head_dim, "gated"),
    ]
    if not shape.is_moe(0):
        asked += [((2 * shape.intermediate_size,), hidden, "norm")]
        asked += [((hidden,), shape.intermediate_size, "swiglu")]
    if shape.num_nextn_predict_layers:
        asked += [((hidden,), 2 * hidden, "joined")]  # eh_proj
    gemv = [
        GemvShape(sum(parts), k, False, prologue=prologue, parts=parts if len(parts) > 1 else ())
        for parts, k, prologue in asked
    ]
    return FusedShapes(tuple(gemv), kda, mla)


def fused_problem(shape: LingShape) -> str | None:
    """Why vLLM's layers will decode this model whatever the GPU, or None."""
    kda = [layer for layer in shape.layers if shape.is_kda(layer)]
    rules = (
        (shape.fmt == "fp4", "its experts are not FP4"),
        (bool(kda), "it has no KDA layer"),
        (shape.short_conv_kernel_size == 4, f"convolutions over {shape.short_conv_kernel_size} tokens"),
        (shape.q_lora_rank is None, "MLA compresses its queries (q_lora_rank)"),
        (
            shape.mla_gate == "head_wise" and shape.v_head_dim == 128,
            "MLA's output gate is not one number per head of 128",
        ),
    )
    if problem := next((reason for holds, reason in rules if not holds), None):
        return problem
    for module, quantized in _linear_modules(shape):
        if shape.is_excluded(module) == quantized:
            return f"{module} is {'not ' if quantized else ''}quantized"
    asked = fused_shapes(shape)
    reasons = [kda_step.unsupported(asked.kda), mla_prepare.unsupported(asked.mla)]
    reasons += [fp8_gemv.unsupported(matrix) for matrix in asked.gemv]
    return next((reason for reason in reasons if reason), None)


def _linear_modules(shape: LingShape) -> Iterator[tuple[str, bool]]:
    """The modules around the experts, by their official names, and whether the path reads them as block FP8."""
    for layer in shape.layers:
        prefix = f"model.layers.{layer}"
        names = _KDA if shape.is_kda(layer) else _MLA
        yield from ((f"{prefix}.attention.{name}", True) for name in names)
        yield f"{prefix}.attention.{'b_proj' if shape.is_kda(layer) else 'g_proj'}", False
        if not shape.is_moe(layer):
            yield from ((f"{prefix}.mlp.{name}", True) for name in ("gate_proj", "up_proj", "down_proj"))
        if layer >= shape.num_hidden_layers:
            yield f"{prefix}.eh_proj", True
