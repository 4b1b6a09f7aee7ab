# SPDX-License-Identifier: Apache-2.0
"""Writes tiny-ling's config, tokenizer with chat template and generation config: all but the weights."""

import json
from pathlib import Path
from typing import Any

from vllm_ling.tiny.tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, VOCAB_SIZE, build_tokenizer, token_id

MODEL_DIR = Path(__file__).parent / "model"

# A Ling-3.0 in miniature, with every kind of layer: KDA at 0, 1, 3, 4; MLA at 2 and 5; dense MLP at 0; clamps
# at 4 and 5; one MTP layer. Widths are multiples of 128, so that the kernels for the real model accept them.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "layer_group_size": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rotary_dim": 64,
    "intermediate_size": 512,
    "first_k_dense_replace": 1,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
    "router_dtype": "fp32",
    "expert_swiglu_limit_list": [0, 0, 0, 0, 4, 4],
    "share_expert_swiglu_limit_list": [0, 0, 0, 0, 5, 7],
    "num_nextn_predict_layers": 1,
    "mtp_use_kda": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "short_conv_kernel_size": 4,
    "group_norm_size": 1,
    "linear_silu": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 6_000_000,
    "rope_interleave": True,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def build_assets(out_dir: str | Path) -> None:
    """Writes config.json (unquantized), tokenizer.json, tokenizer_config.json and generation_config.json."""
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {token: token_id(tokenizer, token) for token in (BOS, PAD, EOS)}
    special = {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    _write(out / "config.json", TINY_CONFIG | special)
    _write(out / "generation_config.json", special | {"eos_token_id": [ids[EOS], ids[PAD]]})
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": TINY_CONFIG["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build_assets(MODEL_DIR)
