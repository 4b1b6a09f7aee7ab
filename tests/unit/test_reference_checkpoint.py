# SPDX-License-Identifier: Apache-2.0
"""Saving and loading: official names and types, sharding, and one clear error for each kind of damage."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.reference_models import small_config, small_model
from vllm_ling.errors import LingError
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.save import official_state_dict, save_checkpoint


def _only_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def test_names_and_types_are_official() -> None:
    tensors = official_state_dict(small_model())
    for name in (
        "model.word_embeddings.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.attention.q_conv1d.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.attention.kv_a_proj_with_mqa.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.5.eh_proj.weight",
        "model.layers.5.final_layernorm.weight",
        "model.layers.5.mlp.gate.weight",
    ):
        assert tensors[name].dtype == torch.bfloat16, name
    for name in ("attention.A_log", "attention.dt_bias"):
        assert tensors[f"model.layers.0.{name}"].dtype == torch.float32
    assert tensors["model.layers.5.mlp.gate.expert_bias"].dtype == torch.float32
    assert tensors["model.layers.0.attention.q_conv1d.weight"].shape == (64, 1, 4)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 24, "num_nextn_predict_layers": 0}])
def test_round_trip_in_shards(tmp_path: Path, changes: dict[str, int]) -> None:
    model = small_model(**changes)
    save_checkpoint(model, small_config(**changes), tmp_path, shard_bytes=200_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(official_state_dict(model))
    loaded = from_checkpoint(tmp_path)
    for name, value in model.state_dict().items():
        keep = name.endswith(("A_log", "dt_bias", "expert_bias"))
        torch.testing.assert_close(loaded.state_dict()[name], value if keep else value.bfloat16().float())


def test_quantized_tensors_are_read_back(tmp_path: Path) -> None:
    from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
    from vllm_ling.quant.int4 import dequantize_int4, quantize_int4
    from vllm_ling.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
    from vllm_ling.quant.row_fp8 import dequantize_row_fp8, quantize_row_fp8

    save_checkpoint(small_model(), small_config(), tmp_path)
    tensors = load_file(_only_file(tmp_path))
    fp8, fp4 = "model.layers.0.attention.q_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
    int4, head = "model.layers.1.mlp.experts.2.gate_proj.weight", "lm_head.weight"
    originals = {name: tensors.pop(name).float() for name in (fp8, fp4, int4, head)}
    tensors[fp8], tensors[f"{fp8}_scale_inv"] = quantize_block_fp8(originals[fp8])
    tensors[fp4], tensors[f"{fp4}_scale_inv"] = quantize_mxfp4(originals[fp4])
    tensors[f"{int4}_packed"], tensors[f"{int4}_scale"] = quantize_int4(originals[int4])
    tensors[f"{int4}_shape"] = torch.tensor(originals[int4].shape)
    tensors[head], tensors[f"{head}_scale"] = quantize_row_fp8(originals[head])
    save_file(tensors, _only_file(tmp_path))
    state = from_checkpoint(tmp_path).state_dict()
    read = {
        fp8: state[fp8],
        fp4: state["model.layers.1.mlp.experts.up_proj"][3],
        int4: state["model.layers.1.mlp.experts.gate_proj"][2],
        head: state[head],
    }
    expected = {
        fp8: dequantize_block_fp8(tensors[fp8], tensors[f"{fp8}_scale_inv"]),
        fp4: dequantize_mxfp4(tensors[fp4], tensors[f"{fp4}_scale_inv"]),
        int4: dequantize_int4(tensors[f"{int4}_packed"], tensors[f"{int4}_scale"], torch.float32),
        head: dequantize_row_fp8(tensors[head], tensors[f"{head}_scale"], torch.float32),
    }
    for name, value in read.items():
        torch.testing.assert_close(value, expected[name], atol=0, rtol=0)
        assert 0 < (value - originals[name]).abs().max() < 0.3 * originals[name].abs().max(), name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "experts.3.up_proj.weight is missing",
        ),
        (
            lambda t: t.update({"model.layers.9.x": torch.zeros(1)}),
            "model.layers.9.x is not part of the model",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight has shape"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn)}),
            "lm_head.weight_scale_inv is missing",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    save_checkpoint(small_model(), small_config(), tmp_path)
    tensors = load_file(_only_file(tmp_path))
    assert callable(damage)
    damage(tensors)
    save_file(tensors, _only_file(tmp_path))
    with pytest.raises(LingError, match=message):
        from_checkpoint(tmp_path)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(LingError, match=r"config\.json is missing"):
        from_checkpoint(tmp_path)
