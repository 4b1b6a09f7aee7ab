# SPDX-License-Identifier: Apache-2.0
"""The model to count for: the published Ling-3.0 shapes by name, or any checkpoint's `config.json`."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.checkpoint.quantization import quantization_section
from vllm_ling.checkpoint.shapes import Format, LingShape
from vllm_ling.errors import LingError

_COMMON: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": 157184,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "routed_scaling_factor": 2.5,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_theta": 6000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

# The dimensions of the published config.json files.
PUBLISHED: dict[str, dict[str, Any]] = {
    "flash": _COMMON
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "layer_group_size": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "moe_shared_expert_intermediate_size": 768,
        "num_experts": 512,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 262144,
        "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
        "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
    },
    "tiny": _COMMON
    | {
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "layer_group_size": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "intermediate_size": 4608,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 131072,
    },
}


def model_shape(model: str, fmt: Format | None = None) -> LingShape:
    """Dimensions and storage format of a model.

    Args:
        model: "flash" or "tiny" (Ling-3.0), a folder, a cached model name, or "tiny-ling".
        fmt: bf16, fp8, fp4 or int4; None takes the checkpoint's own format, and fp4 for a published name.

    Raises:
        LingError: unknown model or format, or a `config.json` that this project does not serve.
    """
    if fmt is not None and fmt not in get_args(Format):
        raise LingError(f"--format {fmt}: not one of {', '.join(get_args(Format))}")
    folder = None if model in PUBLISHED and not Path(model).exists() else resolve_model(model)
    if folder is not None:
        shape = LingShape.from_folder(folder)
        if fmt is None or fmt == shape.fmt:
            return shape
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    elif model in PUBLISHED:
        config = PUBLISHED[model]
    else:
        raise LingError(f"--model {model}: not one of {', '.join(PUBLISHED)}, nor a folder or cached model")
    plain = LingShape.from_config({**config, "quantization_config": None})
    return as_format(plain, fmt or "fp4")


def as_format(shape: LingShape, fmt: Format) -> LingShape:
    """The same dimensions stored as `fmt`, with the exclusions that the official checkpoints declare."""
    section = {} if fmt == "bf16" else quantization_section(shape, fmt)
    excluded = section.get("modules_to_not_convert") or section.get("ignore") or []
    return dataclasses.replace(shape, fmt=fmt, excluded=tuple(excluded))
