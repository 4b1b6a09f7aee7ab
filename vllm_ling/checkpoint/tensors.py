# SPDX-License-Identifier: Apache-2.0
"""The table of tensors that a Ling checkpoint must hold: official names, shapes, allowed dtypes, what they are for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_ling.checkpoint.shapes import LingShape

Role = Literal["embedding", "head", "attention", "dense", "shared", "router", "experts", "norm", "mtp"]
FLOAT = ("BF16", "F16", "F32")
FP8, SCALE, E8M0 = ("F8_E4M3",), ("F8_E8M0", "F32", "U8"), ("U8", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor must look like."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: Role


def expected_tensors(shape: LingShape) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of this shape and format, the declared MTP layers included.

    The head is listed in BF16; `validate` allows an FP8 head with its scale in its place.
    """
    return dict(_tensors(shape))


def _tensors(s: LingShape) -> Iterator[tuple[str, TensorSpec]]:
    hidden = s.hidden_size
    yield "model.word_embeddings.weight", TensorSpec((s.vocab_size, hidden), FLOAT, "embedding")
    yield "lm_head.weight", TensorSpec((s.vocab_size, hidden), FLOAT, "head")
    yield "model.norm.weight", TensorSpec((hidden,), FLOAT, "norm")
    for layer in s.layers:
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", TensorSpec((hidden,), FLOAT, "norm")
        yield from _kda(s, f"{prefix}.attention") if s.is_kda(layer) else _mla(s, f"{prefix}.attention")
        yield from (
            _moe(s, f"{prefix}.mlp")
            if s.is_moe(layer)
            else _mlp(s, f"{prefix}.mlp", s.intermediate_size, "dense")
        )
        if layer >= s.num_hidden_layers:
            for norm in ("enorm", "hnorm", "final_layernorm"):
                yield f"{prefix}.{norm}.weight", TensorSpec((hidden,), FLOAT, "mtp")
            yield from _linear(s, f"{prefix}.eh_proj", hidden, 2 * hidden, "mtp")


def _kda(s: LingShape, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    width = s.num_attention_heads * s.head_dim
    for name in ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj"):
        yield from _linear(s, f"{prefix}.{name}", width, s.hidden_size, "attention")
    yield from _linear(s, f"{prefix}.b_proj", s.num_attention_heads, s.hidden_size, "attention")
    yield from _linear(s, f"{prefix}.o_proj", s.hidden_size, width, "attention")
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield f"{prefix}.{name}.weight", TensorSpec((width, 1, s.short_conv_kernel_size), FLOAT, "attention")
    yield f"{prefix}.A_log", TensorSpec((s.num_attention_heads,), FLOAT, "attention")
    yield f"{prefix}.dt_bias", TensorSpec((width,), FLOAT, "attention")
    yield f"{prefix}.o_norm.weight", TensorSpec((s.head_dim,), FLOAT, "norm")


def _mla(s: LingShape, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    heads, hidden = s.num_attention_heads, s.hidden_size
    query = heads * (s.qk_nope_head_dim + s.qk_rope_head_dim)
    if s.q_lora_rank is None:
        yield from _linear(s, f"{prefix}.q_proj", query, hidden, "attention")
    else:
        yield from _linear(s, f"{prefix}.q_a_proj", s.q_lora_rank, hidden, "attention")
        yield f"{prefix}.q_a_layernorm.weight", TensorSpec((s.q_lora_rank,), FLOAT, "norm")
        yield from _linear(s, f"{prefix}.q_b_proj", query, s.q_lora_rank, "attention")
    yield from _linear(
        s, f"{prefix}.kv_a_proj_with_mqa", s.kv_lora_rank + s.qk_rope_head_dim, hidden, "attention"
    )
    yield f"{prefix}.kv_a_layernorm.weight", TensorSpec((s.kv_lora_rank,), FLOAT, "norm")
    yield from _linear(
        s, f"{prefix}.kv_b_proj", heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank, "attention"
    )
    if s.mla_gate is not None:
        gate = heads if s.mla_gate == "head_wise" else heads * s.v_head_dim
        yield from _linear(s, f"{prefix}.g_proj", gate, hidden, "attention")
    yield from _linear(s, f"{prefix}.dense", hidden, heads * s.v_head_dim, "attention")


def _mlp(s: LingShape, prefix: str, width: int, role: Role) -> Iterator[tuple[str, TensorSpec]]:
    yield from _linear(s, f"{prefix}.gate_proj", width, s.hidden_size, role)
    yield from _linear(s, f"{prefix}.up_proj", width, s.hidden_size, role)
    yield from _linear(s, f"{prefix}.down_proj", s.hidden_size, width, role)


def _moe(s: LingShape, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}.gate.weight", TensorSpec((s.num_experts, s.hidden_size), FLOAT, "router")
    yield f"{prefix}.gate.expert_bias", TensorSpec((s.num_experts,), FLOAT, "router")
    yield from _mlp(s, f"{prefix}.shared_experts", s.shared_intermediate_size, "shared")
    hidden, width = s.hidden_size, s.moe_intermediate_size
    for projection, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        fields = _expert_fields(s, rows, cols)
        for expert in range(s.num_experts):
            for suffix, spec in fields:
                yield f"{prefix}.experts.{expert}.{projection}_proj.{suffix}", spec


def _expert_fields(s: LingShape, rows: int, cols: int) -> list[tuple[str, TensorSpec]]:
    if s.fmt == "bf16":
        return [("weight", TensorSpec((rows, cols), FLOAT, "experts"))]
    if s.fmt == "fp8":
        blocks = (-(-rows // 128), -(-cols // 128))
        return [
            ("weight", TensorSpec((rows, cols), FP8, "experts")),
            ("weight_scale_inv", TensorSpec(blocks, SCALE, "experts")),
        ]
    if s.fmt == "fp4":
        return [
            ("weight", TensorSpec((rows, cols // 2), ("U8", "I8"), "experts")),
            ("weight_scale_inv", TensorSpec((rows, cols // 32), E8M0, "experts")),
        ]
    return [
        ("weight_packed", TensorSpec((rows, cols // 8), ("I32",), "experts")),
        ("weight_scale", TensorSpec((rows, cols // 32), FLOAT, "experts")),
        ("weight_shape", TensorSpec((2,), ("I32", "I64"), "experts")),
    ]


def _linear(s: LingShape, module: str, rows: int, cols: int, role: Role) -> Iterator[tuple[str, TensorSpec]]:
    if s.fmt in ("bf16", "int4") or s.is_excluded(module):
        yield f"{module}.weight", TensorSpec((rows, cols), FLOAT, role)
        return
    yield f"{module}.weight", TensorSpec((rows, cols), FP8, role)
    yield f"{module}.weight_scale_inv", TensorSpec((-(-rows // 128), -(-cols // 128)), SCALE, role)
