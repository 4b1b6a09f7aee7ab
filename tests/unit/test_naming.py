# SPDX-License-Identifier: Apache-2.0
"""Official tensor names find their vLLM parameters; the MTP layer belongs to the draft and the rest to the target."""

from types import SimpleNamespace

import pytest

from vllm_ling.models.naming import Target, draft_name, place, target_name

CONFIG = SimpleNamespace(num_hidden_layers=42, num_nextn_predict_layers=1)
PARAMETERS = {
    "lm_head.weight",
    "lm_head.weight_scale",
    "model.word_embeddings.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.b_proj.weight",
    "model.layers.1.self_attn.qkvb_proj.weight",
    "model.layers.5.self_attn.q_proj.weight",
    "model.layers.5.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
    "model.layers.6.self_attn.fused_qkv_a_proj.weight",
    "model.layers.3.mlp.gate_up_proj.weight",
    "model.layers.4.mlp.experts.routed_experts.w13_weight",
    "model.layers.4.mlp.experts.routed_experts.w13_weight_scale",
    "model.layers.7.mlp.experts.routed_experts.w2_weight_scale_inv",
    "model.layers.8.mlp.experts.routed_experts.w2_weight_packed",
    "model.layers.42.eh_proj.weight",
}
L = "model.layers."
E = ".mlp.experts.routed_experts."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head.weight_scale", Target("lm_head.weight_scale")),
        (f"{L}0.attention.k_proj.weight", Target(f"{L}0.self_attn.qkv_proj.weight", 1)),
        (f"{L}0.attention.b_proj.weight", Target(f"{L}0.self_attn.b_proj.weight")),
        (f"{L}1.attention.b_proj.weight", Target(f"{L}1.self_attn.qkvb_proj.weight", 3)),
        (f"{L}5.attention.q_proj.weight", Target(f"{L}5.self_attn.q_proj.weight")),
        (
            f"{L}5.attention.kv_a_proj_with_mqa.weight_scale_inv",
            Target(f"{L}5.self_attn.kv_a_proj_with_mqa.weight_scale_inv"),
        ),
        (f"{L}6.attention.kv_a_proj_with_mqa.weight", Target(f"{L}6.self_attn.fused_qkv_a_proj.weight", 1)),
        (f"{L}3.mlp.up_proj.weight", Target(f"{L}3.mlp.gate_up_proj.weight", 1)),
        (f"{L}4.mlp.experts.11.up_proj.weight", Target(f"{L}4{E}w13_weight", (11, "w3"))),
        (f"{L}4.mlp.experts.11.gate_proj.weight_scale_inv", Target(f"{L}4{E}w13_weight_scale", (11, "w1"))),
        (f"{L}7.mlp.experts.0.down_proj.weight_scale_inv", Target(f"{L}7{E}w2_weight_scale_inv", (0, "w2"))),
        (f"{L}8.mlp.experts.0.down_proj.weight_packed", Target(f"{L}8{E}w2_weight_packed", (0, "w2"))),
        ("lm_head.weight_scale_inv", None),
        (f"{L}4.mlp.experts.11.gate_proj.bias", None),
        (f"{L}0.attention.z_proj.weight", None),
    ],
)
def test_place(name: str, expected: Target | None) -> None:
    assert place(name, PARAMETERS) == expected


def test_target_and_draft_share_the_file() -> None:
    target, draft = target_name(CONFIG), draft_name(CONFIG)
    mtp, body = f"{L}42.eh_proj.weight", f"{L}0.attention.b_proj.weight"
    assert target(mtp, PARAMETERS) == "elsewhere" and draft(mtp, PARAMETERS) == Target(mtp)
    assert draft(body, PARAMETERS) == "elsewhere"
    assert draft("lm_head.weight", PARAMETERS) == "elsewhere"
    assert draft("model.word_embeddings.weight", PARAMETERS) == Target("model.embed_tokens.weight")
    # A layer beyond the declared MTP layers belongs to nobody.
    assert target(f"{L}43.eh_proj.weight", PARAMETERS) is None
    assert draft(f"{L}43.eh_proj.weight", PARAMETERS) is None
