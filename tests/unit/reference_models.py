# SPDX-License-Identifier: Apache-2.0
"""Small Ling models with random weights for tests of the reference."""

from typing import Any

import torch

from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.model import LingReference


def small_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` with KDA at layers 0 and 2, MLA at 1, 3 and the ungrouped 4, and one MTP layer."""
    return {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "layer_group_size": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 64,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "expert_swiglu_limit_list": [0, 0, 0, 0.5, 0.5],
        "share_expert_swiglu_limit_list": [0, 0, 0, 0.5, 0.7],
    } | changes


def small_model(seed: int = 0, **changes: Any) -> LingReference:
    """Evaluation mode; `ignore_clamps` and `drop_expert` go to the model, other changes to its config."""
    controls = {k: changes.pop(k) for k in ("ignore_clamps", "drop_expert") if k in changes}
    model = LingReference(ReferenceConfig.from_dict(small_config(**changes)), **controls)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(center + 0.25 * torch.randn(parameter.shape, generator=generator))
        for _, moe in model.moe_layers():
            moe.gate.expert_bias.copy_(0.2 * torch.randn(moe.gate.expert_bias.shape, generator=generator))
    return model.eval()
