# SPDX-License-Identifier: Apache-2.0
"""Configs that name a variant no Ling has, or sizes no model has, are refused before a table is built."""

from typing import Any

import pytest

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.synthetic import mini_config
from vllm_ling.checkpoint.tensors import expected_tensors
from vllm_ling.errors import LingError

FLASH = mini_config("flash", "int4", mtp=True, clamp=4)
WEIGHTS: dict[str, Any] = FLASH["quantization_config"]["config_groups"]["group_0"]["weights"]


def int4(**changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": WEIGHTS | changes}}
    return {"quantization_config": FLASH["quantization_config"] | {"config_groups": groups}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"no_kda_lora": False}, "no_kda_lora is False"),
        ({"mtp_use_kda": True}, "mtp_use_kda is True"),
        ({"use_bias": True}, "use_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_experts": 10**9, "n_group": 1}, "num_experts is 1000000000"),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers is 1000000"),
        ({"hidden_size": 2**63}, "hidden_size is"),
        ({"expert_swiglu_limit_list": [-4] * 6}, "expert_swiglu_limit_list must hold 0"),
        ({"expert_swiglu_limit_list": [float("nan")] * 6}, "expert_swiglu_limit_list must hold 0"),
        (int4(num_bits=8), "only pack-quantized, symmetric 4-bit"),
        (int4(group_size=128), "only pack-quantized, symmetric 4-bit"),
        (int4(symmetric=False), "only pack-quantized, symmetric 4-bit"),
        (int4(type="float"), "only pack-quantized, symmetric 4-bit"),
        (
            {"quantization_config": FLASH["quantization_config"] | {"format": "nvfp4-pack-quantized"}},
            "only pack-quantized",
        ),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "only pack-quantized"),
    ],
)
def test_a_foreign_variant_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LingError) as raised:
        LingShape.from_config(FLASH | changes)
    assert str(raised.value).startswith("config.json: ")
    assert named in str(raised.value)


def test_keys_that_default_to_what_ling_has_may_be_absent() -> None:
    optional = ("mtp_use_kda", "use_bias", "hidden_act", "norm_topk_prob", "score_function")
    config = {key: value for key, value in FLASH.items() if key not in optional}
    assert LingShape.from_config(config) == LingShape.from_config(FLASH)


def test_overrides_come_before_the_modules_that_stay_bf16() -> None:
    config = mini_config("flash", "fp4", mtp=True, clamp=4, num_hidden_layers=3)
    assert config["quantization_config"]["modules_to_not_convert"] == [
        "b_proj",
        "2.attention.g_proj",
        "3.attention.g_proj",
    ]
    gate = expected_tensors(LingShape.from_config(config))["model.layers.3.attention.g_proj.weight"]
    assert "BF16" in gate.dtypes
