# SPDX-License-Identifier: Apache-2.0
"""Writes small random checkpoints in every official format, to test loaders and kernels without the real weights."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from vllm_ling.checkpoint.quantization import quantization_section
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.tensors import TensorSpec, expected_tensors
from vllm_ling.quant.block_fp8 import quantize_block_fp8
from vllm_ling.quant.int4 import quantize_int4
from vllm_ling.quant.mxfp4 import quantize_mxfp4
from vllm_ling.quant.row_fp8 import quantize_row_fp8

# Gain of the attention and feed-forward outputs: large enough that every layer moves the logits.
_GAIN = 1.5
_FLOAT32 = ("A_log", "dt_bias", "expert_bias")


def mini_config(
    shape: Literal["flash", "tiny"], fmt: str, mtp: bool, clamp: float, **overrides: Any
) -> dict[str, Any]:
    """A valid `config.json` with the structure of Ling-3.0-flash (q_lora null) or -tiny (q_lora, no clamps), small."""
    layers, group = (4, 2) if shape == "tiny" else (6, 3)
    layers = overrides.get("num_hidden_layers", layers)
    config: dict[str, Any] = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 512,
        "q_lora_rank": 128 if shape == "tiny" else None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "layer_group_size": group,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "short_conv_kernel_size": 4,
        "gated_attention_proj_granularity_type": "head_wise",
        "num_nextn_predict_layers": int(mtp),
        "rope_theta": 6000000.0,
        "rope_interleave": True,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "use_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": "bfloat16",
    }
    if shape == "flash":
        config["expert_swiglu_limit_list"] = [0] * (layers - 3) + [clamp] * 3
        config["share_expert_swiglu_limit_list"] = [0] * (layers - 2) + [clamp * 1.25] * 2
    config |= overrides
    # After the overrides: the modules that stay BF16 depend on the layers.
    if fmt != "bf16" and "quantization_config" not in overrides:
        config["quantization_config"] = quantization_section(LingShape.from_config(config), fmt)
    return config


def make_checkpoint(
    folder: Path,
    shape: Literal["flash", "tiny"] = "flash",
    fmt: str = "fp4",
    seed: int = 0,
    mtp: bool = True,
    clamp: float = 0.3,
    head_fp8: Literal["none", "row", "block", "noscale"] = "none",
    shards: int = 3,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint and returns its folder.

    Args:
        fmt: bf16, fp8, fp4 or int4.
        clamp: SwiGLU limit of the late layers (flash only); 0.3 bites on many values, 1e4 on none.
        head_fp8: store the head in FP8, with row scales, block scales, or (a fault) without.
        overrides: replace entries of config.json.
    """
    config = mini_config(shape, fmt, mtp, clamp, **overrides)
    tensors = random_tensors(config, seed, head_fp8)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def random_tensors(config: dict[str, Any], seed: int, head_fp8: str = "none") -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint that `config` declares, random and of sensible size, stored in its format."""
    shape = LingShape.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    specs = expected_tensors(shape)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        if name.endswith(("weight_scale_inv", "weight_scale", "weight_shape")):
            continue
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            value = _value(
                name, TensorSpec((spec.shape[0], spec.shape[1] * 8), ("BF16",), spec.role), generator
            )
            packed, scale = quantize_int4(value)
            tensors |= {name: packed, f"{module}.weight_scale": scale}
            tensors[f"{module}.weight_shape"] = torch.tensor(value.shape)
        elif spec.dtypes == ("U8", "I8"):
            value = _value(
                name, TensorSpec((spec.shape[0], spec.shape[1] * 2), ("BF16",), spec.role), generator
            )
            codes, scale = quantize_mxfp4(value)
            tensors |= {name: codes, f"{module}.weight_scale_inv": scale}
        elif spec.dtypes == ("F8_E4M3",):
            codes, block_scale = quantize_block_fp8(_value(name, spec, generator))
            tensors |= {name: codes, f"{module}.weight_scale_inv": block_scale.to(torch.float8_e8m0fnu)}
        else:
            dtype = torch.float32 if leaf in _FLOAT32 else torch.bfloat16
            tensors[name] = _value(name, spec, generator).to(dtype)
    _store_head(tensors, head_fp8)
    return tensors


def _store_head(tensors: dict[str, torch.Tensor], head_fp8: str) -> None:
    head = tensors["lm_head.weight"]
    if head_fp8 == "block":
        tensors["lm_head.weight"], tensors["lm_head.weight_scale_inv"] = quantize_block_fp8(head, ue8m0=False)
    elif head_fp8 != "none":
        tensors["lm_head.weight"], scale = quantize_row_fp8(head)
        if head_fp8 == "row":
            tensors["lm_head.weight_scale"] = scale


def _value(name: str, spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(spec.shape, generator=generator)
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        return noise * 0.3
    if leaf == "dt_bias":
        return noise * 0.5 - 1
    if leaf == "expert_bias":
        return noise * 0.05
    if "norm" in name:
        return 1 + 0.1 * noise
    if "conv1d" in name:
        return noise * 0.5
    if "word_embeddings" in name:
        return noise
    return noise * _GAIN / spec.shape[-1] ** 0.5
