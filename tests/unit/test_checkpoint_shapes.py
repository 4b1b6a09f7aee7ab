# SPDX-License-Identifier: Apache-2.0
"""LingShape: layer kinds and formats from config.json, and an error naming the key for each contradiction."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.synthetic import mini_config
from vllm_ling.errors import LingError

FLASH = mini_config("flash", "fp4", mtp=True, clamp=4)
# The published dimensions of Ling-3.0-flash and -tiny, as far as layers go.
OFFICIAL = {
    "flash": FLASH | {"num_hidden_layers": 42, "layer_group_size": 6, "first_k_dense_replace": 2},
    "tiny": FLASH | {"num_hidden_layers": 24, "layer_group_size": 4, "num_nextn_predict_layers": 0},
}


def shape_of(**changes: Any) -> LingShape:
    return LingShape.from_config(FLASH | changes)


@pytest.mark.parametrize(
    ("name", "mla", "layers"),
    [("flash", [5, 11, 17, 23, 29, 35, 41, 42], 43), ("tiny", [3, 7, 11, 15, 19, 23], 24)],
)
def test_layer_kinds_of_the_official_models(name: str, mla: list[int], layers: int) -> None:
    config = OFFICIAL[name] | {"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None}
    shape = LingShape.from_config(config)
    assert list(shape.layers) == list(range(layers))
    assert [layer for layer in shape.layers if not shape.is_kda(layer)] == mla
    assert [layer for layer in shape.layers if not shape.is_moe(layer)] == list(
        range(shape.first_k_dense_replace)
    )
    assert shape.routed_limits == (None,) * shape.num_hidden_layers


def test_a_last_group_that_is_not_whole_is_mla() -> None:
    shape = shape_of(num_hidden_layers=5, layer_group_size=3)
    assert [shape.is_kda(layer) for layer in range(6)] == [True, True, False, False, False, False]


def test_limits_are_per_layer_and_zero_means_none() -> None:
    shape = shape_of()
    assert shape.routed_limits == (None, None, None, 4.0, 4.0, 4.0)
    assert shape.shared_limits == (None, None, None, None, 5.0, 5.0)
    longer = shape_of(expert_swiglu_limit_list=[0, None, 1, 2, 3, 4, 99])
    assert longer.routed_limits == (None, None, 1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4", "int4"])
def test_the_format_comes_from_the_quantization_section(fmt: Any) -> None:
    assert LingShape.from_config(mini_config("tiny", fmt, mtp=False, clamp=4)).fmt == fmt


def test_exclusions_match_at_component_boundaries() -> None:
    shape = shape_of()
    assert shape.is_excluded("model.layers.0.attention.b_proj")
    assert shape.is_excluded("model.layers.2.attention.g_proj")
    assert not shape.is_excluded("model.layers.12.attention.g_proj")
    assert not shape.is_excluded("model.layers.0.attention.g_proj")
    assert not shape.is_excluded("model.layers.0.attention.sub_proj")
    dotted = FLASH["quantization_config"] | {"modules_to_not_convert": [".b_proj"]}
    assert not shape_of(quantization_config=dotted).is_excluded("model.layers.0.attention.b_proj")
    older = FLASH["quantization_config"] | {"modules_to_not_convert": None, "ignored_layers": ["b_proj"]}
    assert shape_of(quantization_config=older).excluded == ("b_proj",)


def section(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": FLASH["quantization_config"] | changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": None}, "architectures None"),
        ({"architectures": "BailingMoeV3ForCausalLM"}, "architectures"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        *[
            ({key: value}, f"{key} is {value!r}")
            for key in ("hidden_size", "vocab_size", "num_experts", "layer_group_size", "num_hidden_layers")
            for value in (None, "256", 2.0, True, 0, -1)
        ],
        ({"q_lora_rank": "none"}, "q_lora_rank is 'none'"),
        ({"n_group": 0}, "n_group is 0"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace is None"),
        ({"n_group": 3}, "n_group does not divide num_experts"),
        ({"topk_group": 5}, "topk_group exceeds n_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok exceeds"),
        ({"gated_attention_proj_granularity_type": "row"}, "gated_attention_proj_granularity_type 'row'"),
        ({"expert_swiglu_limit_list": [4]}, "expert_swiglu_limit_list needs 6 entries"),
        ({"expert_swiglu_limit_list": 4}, "expert_swiglu_limit_list needs 6 entries"),
        ({"share_expert_swiglu_limit_list": ["x"] * 6}, "share_expert_swiglu_limit_list must hold numbers"),
        ({"quantization_config": "fp8"}, "quantization_config.quant_method None"),
        (section(quant_method="awq"), "quantization_config.quant_method 'awq'"),
        (section(weight_block_size=[64, 128]), "weight_block_size"),
        (section(modules_to_not_convert="b_proj"), "modules_to_not_convert must be a list"),
        (section(routed_experts_quant_method="nvfp4"), "routed_experts_quant_method 'nvfp4'"),
        (section(routed_experts_group_size=16), "routed_experts_group_size 16"),
        (section(quant_method="compressed-tensors", ignore=[1]), "quantization_config.ignore must be a list"),
    ],
)
def test_each_error_names_its_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LingError) as raised:
        shape_of(**changes)
    assert str(raised.value).startswith("config.json: ")
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no such file"),
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_config_file_that_cannot_be_read(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(LingError, match=rf"config\.json: {problem}"):
        LingShape.from_folder(tmp_path)


def test_from_folder_reads_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    assert LingShape.from_folder(tmp_path) == LingShape.from_config(FLASH)
