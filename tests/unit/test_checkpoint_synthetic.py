# SPDX-License-Identifier: Apache-2.0
"""Synthetic checkpoints: every format, shape and head validates and is reproducible."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoint_files import SMALL, single_thread
from vllm_ling.checkpoint.headers import read_headers
from vllm_ling.checkpoint.synthetic import make_checkpoint, mini_config, random_tensors
from vllm_ling.checkpoint.validate import validate_checkpoint

__all__ = ["single_thread"]
pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4", "int4"])
@pytest.mark.parametrize("shape", ["flash", "tiny"])
def test_every_format_and_shape_validates(tmp_path: Path, shape: Any, fmt: Any) -> None:
    mtp = shape == "flash"
    facts = validate_checkpoint(make_checkpoint(tmp_path, shape, fmt, mtp=mtp, shards=4))
    assert (facts.fmt, facts.has_mtp, facts.head_scale) == (fmt, mtp, "none")
    assert (facts.shape.q_lora_rank is None) == (shape == "flash")
    assert any(limit is not None for limit in facts.shape.routed_limits) == (shape == "flash")
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_modules_that_stay_bf16() -> None:
    flash = mini_config("flash", "fp4", mtp=True, clamp=4)["quantization_config"]["modules_to_not_convert"]
    assert flash == ["b_proj", "2.attention.g_proj", "5.attention.g_proj", "6.attention.g_proj"]
    tiny = mini_config("tiny", "fp8", mtp=False, clamp=4)["quantization_config"]["modules_to_not_convert"]
    lora = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    assert tiny[:3] == ["b_proj", "1.attention.g_proj", "3.attention.g_proj"]
    assert tiny[3:] == [f"{layer}.attention.{name}" for layer in (1, 3) for name in lora]


@pytest.mark.parametrize(
    ("head", "scale"), [("row", "lm_head.weight_scale"), ("block", "lm_head.weight_scale_inv")]
)
def test_fp8_heads(tmp_path: Path, head: Any, scale: str) -> None:
    folder = make_checkpoint(tmp_path, "flash", "bf16", mtp=False, head_fp8=head, **SMALL)
    assert validate_checkpoint(folder).head_scale == head
    headers = read_headers(folder)
    assert headers["lm_head.weight"].dtype == "F8_E4M3" and headers[scale].dtype == "F32"


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    config = mini_config("tiny", "fp4", mtp=False, clamp=4) | SMALL
    config["quantization_config"]["modules_to_not_convert"].append("q_proj")
    first, same, other = (random_tensors(config, seed) for seed in (0, 0, 1))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert first.keys() == same.keys() == other.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), same[key].view(torch.uint8)), key
        assert tensor.float().isfinite().all(), key
    assert not torch.equal(first[name], other[name])


def test_float32_tensors_are_the_official_ones(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "flash", "fp4", mtp=True, shards=1, **SMALL)
    (file,) = folder.glob("*.safetensors")
    wide = {name.rpartition(".")[2] for name, t in load_file(file).items() if t.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", "expert_bias"}
