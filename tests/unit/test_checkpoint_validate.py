# SPDX-License-Identifier: Apache-2.0
"""Validation: each fault in a checkpoint is one error naming the tensor or key, from headers alone, and fast."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint_files import Tensors, declared_tensors, single_thread, write_checkpoint
from vllm_ling.checkpoint.synthetic import make_checkpoint, mini_config
from vllm_ling.checkpoint.validate import validate_checkpoint
from vllm_ling.errors import LingError

CONFIG = mini_config("flash", "fp4", mtp=True, clamp=4)
MTP = "model.layers.6."
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
__all__ = ["single_thread"]
Change = Callable[[dict[str, Any], Tensors], Any]


def put(name: str, dtype: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: (dtype, shape)})


def drop(*parts: str) -> Change:
    def apply(config: dict[str, Any], tensors: Tensors) -> None:
        gone = [name for name in tensors if any(part in name for part in parts)]
        assert gone
        for name in gone:
            del tensors[name]

    return apply


def store_as(name: str, dtype: str) -> Change:
    return lambda config, tensors: tensors.update({name: (dtype, tensors[name][1])})


def exclude(*modules: str) -> Change:
    section = CONFIG["quantization_config"] | {"modules_to_not_convert": list(modules)}
    return lambda config, tensors: config.update(quantization_config=section)


def declare(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


def both(*changes: Change) -> Change:
    return lambda config, tensors: [change(config, tensors) for change in changes]


def damaged(folder: Path, change: Change) -> Path:
    config, tensors = dict(CONFIG), declared_tensors(CONFIG)
    change(config, tensors)
    return write_checkpoint(folder, config, tensors)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4", "int4"])
@pytest.mark.parametrize("shape", ["flash", "tiny"])
def test_facts_of_a_sound_checkpoint(tmp_path: Path, shape: Any, fmt: Any) -> None:
    config = mini_config(shape, fmt, mtp=shape == "flash", clamp=4)
    tensors = declared_tensors(config)
    facts = validate_checkpoint(write_checkpoint(tmp_path, config, tensors))
    assert (facts.fmt, facts.has_mtp, facts.head_scale) == (fmt, shape == "flash", "none")
    assert facts.n_tensors == len(tensors)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 0 < stored - facts.total_bytes < 200 * len(tensors)
    assert sum(facts.bytes_by_role.values()) == facts.total_bytes
    roles = {"embedding", "head", "attention", "dense", "shared", "router", "experts", "norm"}
    assert set(facts.bytes_by_role) == roles | ({"mtp"} if facts.has_mtp else set())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            drop("layers.0.attention.q_proj.weight_scale_inv"),
            "layers.0.attention.q_proj.weight_scale_inv: missing",
        ),
        (drop(f"{EXPERT}_scale_inv"), f"{EXPERT}_scale_inv: missing"),
        (drop("model.layers.3."), "model.layers.3.input_layernorm.weight: missing"),
        (drop("model.layers.3."), "more problems)"),
        (drop("experts.15."), "num_experts is 16, but the checkpoint holds 15 experts"),
        (put("model.layers.1.mlp.experts.16.up_proj.weight", "U8", 128, 128), "num_experts is 16"),
        (put("model.layers.1.mlp.experts.x.up_proj.weight", "U8", 128, 128), "num_experts is 16"),
        (drop("layers.1.mlp.experts.15."), "model.layers.1.mlp.experts.15.gate_proj.weight: missing"),
        (put("model.layers.9.norm.weight", "BF16", 256), "model.layers.9.norm.weight (model-"),
        (put("model.layers.9.norm.weight", "BF16", 256), "not part of a Ling fp4 checkpoint"),
        (put("lm_head.bias", "BF16", 512), "lm_head.bias"),
        (put("model.norm.weight", "BF16", 255), "model.norm.weight (model-"),
        (put("model.norm.weight", "BF16", 255), "shape [255], expected [256]"),
        (put(EXPERT, "BF16", 128, 256), f"{EXPERT} (model-"),
        (store_as(EXPERT, "F8_E4M3"), "stored as F8_E4M3, expected U8 or I8"),
        (store_as(f"{EXPERT}_scale_inv", "F32"), "stored as F32, expected U8 or F8_E8M0"),
        (store_as("model.layers.0.attention.o_proj.weight", "BF16"), "stored as BF16, expected F8_E4M3"),
        (store_as("model.layers.0.attention.o_proj.weight", "BF16"), "modules_to_not_convert?"),
        (store_as("model.layers.0.attention.A_log", "I64"), "A_log"),
        (store_as("lm_head.weight", "F8_E4M3"), "lm_head.weight: stored as FP8, but lm_head.weight_scale"),
        (both(store_as("lm_head.weight", "F8_E4M3"), put("lm_head.weight_scale", "F32", 511)), "shape [511]"),
        (put("lm_head.weight_scale", "F32", 512), "lm_head.weight_scale"),
        (declare(num_experts=32), "num_experts is 32, but the checkpoint holds 16 experts"),
        (declare(vocab_size=1024), "model.word_embeddings.weight"),
        (declare(num_nextn_predict_layers=0), f": {MTP}"),
        (declare(num_nextn_predict_layers=0), "not part of a Ling fp4 checkpoint"),
        (declare(num_nextn_predict_layers=2), "model.layers.7."),
        (drop(f"{MTP}eh_proj"), f"{MTP}eh_proj.weight: missing"),
    ],
)
def test_each_fault_is_named(tmp_path: Path, change: Change, named: str) -> None:
    with pytest.raises(LingError) as raised:
        validate_checkpoint(damaged(tmp_path, change))
    message = str(raised.value)
    assert message.startswith((f"{tmp_path}: ", "lm_head.weight: "))
    assert named in message
    assert "\n" not in message


def test_an_exclusion_that_matches_nothing_is_suspected(tmp_path: Path) -> None:
    gate = "model.layers.2.attention.g_proj.weight"
    change = both(
        exclude("b_proj", "g_proj.weight", "5.attention.g_proj", "6.attention.g_proj"), store_as(gate, "BF16")
    )
    with pytest.raises(LingError) as raised:
        validate_checkpoint(damaged(tmp_path, change))
    assert f"{gate}_scale_inv: missing" in str(raised.value)
    with pytest.raises(LingError, match=r"its entry 'g_proj\.weight' matches no module"):
        validate_checkpoint(damaged(tmp_path, both(change, put(f"{gate}_scale_inv", "F8_E8M0", 1, 2))))


def test_absent_mtp_layers_are_recorded(tmp_path: Path) -> None:
    facts = validate_checkpoint(damaged(tmp_path, drop(MTP)))
    assert not facts.has_mtp
    assert facts.shape.num_nextn_predict_layers == 1


@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (put("lm_head.weight_scale", "F32", 512), "row"),
        (put("lm_head.weight_scale", "F32", 512, 1), "row"),
        (put("lm_head.weight_scale_inv", "F32", 4, 2), "block"),
    ],
)
def test_an_fp8_head_with_its_scale(tmp_path: Path, scale: Change, kind: str) -> None:
    folder = damaged(tmp_path, both(store_as("lm_head.weight", "F8_E4M3"), scale))
    assert validate_checkpoint(folder).head_scale == kind


def test_a_real_head_without_its_scale(tmp_path: Path, single_thread: None) -> None:
    make_checkpoint(tmp_path, "tiny", "bf16", mtp=False, head_fp8="noscale", num_hidden_layers=1)
    with pytest.raises(LingError, match=r"lm_head\.weight_scale .* is missing"):
        validate_checkpoint(tmp_path)


def wide_config(layers: int) -> dict[str, Any]:
    """Experts and layer groups of Ling-3.0-flash, in a small width."""
    mla = [layer for layer in range(layers + 1) if (layer + 1) % 6 == 0 or layer == layers]
    excluded = ["b_proj", *(f"{layer}.attention.g_proj" for layer in mla)]
    return CONFIG | {
        "num_hidden_layers": layers,
        "layer_group_size": 6,
        "first_k_dense_replace": 2,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "expert_swiglu_limit_list": None,
        "share_expert_swiglu_limit_list": None,
        "quantization_config": CONFIG["quantization_config"] | {"modules_to_not_convert": excluded},
    }


def test_a_flagship_sized_checkpoint_takes_under_two_seconds(tmp_path: Path) -> None:
    config = wide_config(layers=42)
    tensors = declared_tensors(config)
    assert len(tensors) > 125_000
    write_checkpoint(tmp_path, config, tensors, shards=24)
    start = time.process_time()
    assert validate_checkpoint(tmp_path).n_tensors == len(tensors)
    validated = time.process_time()
    for path in tmp_path.glob("*.safetensors"):
        with path.open("rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))
    # A busy machine is given more, in units of what parsing the headers alone takes there.
    assert validated - start < max(2, 8 * (time.process_time() - validated))


def test_thousands_of_faults_are_refused_as_fast(tmp_path: Path) -> None:
    config = wide_config(layers=12)
    section = {key: value for key, value in config["quantization_config"].items() if "routed" not in key}
    config["quantization_config"] = section
    tensors = {
        name: ("BF16" if dtype == "F8_E4M3" else dtype, shape)
        for name, (dtype, shape) in declared_tensors(config).items()
    }
    write_checkpoint(tmp_path, config, tensors, shards=4)
    start = time.process_time()
    with pytest.raises(LingError, match=r"stored as BF16, expected F8_E4M3.*\(and 17,\d\d\d more problems\)"):
        validate_checkpoint(tmp_path)
    assert time.process_time() - start < 5
