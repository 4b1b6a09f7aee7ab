# SPDX-License-Identifier: Apache-2.0
"""Every checkpoint format and both model shapes through a real engine against the independent fp32 reference.

FP32 engine, same stored bytes on both sides, so quantization error cancels and only the arithmetic order differs.
Each negative control (a scale off by one, an expert dropped, clamps ignored) must break the very same bound.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.eval.studies.parity import prompts, reference_logits, relative_rms

# FP32 sums of a few hundred terms in another order, over six layers: measured 1e-6; a wrong scale shows at 1e-2.
FP32_RMS = 2e-5
CASES = [(shape, fmt) for shape in ("flash", "tiny") for fmt in ("bf16", "fp8", "fp4", "int4")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("formats")
    made = {
        (shape, fmt): make_checkpoint(
            root / f"{shape}-{fmt}", shape=shape, fmt=fmt, seed=3, mtp=shape == "flash"
        )
        for shape, fmt in CASES
    }
    for stored in ("row", "block"):
        made["head", stored] = make_checkpoint(root / f"head-{stored}", fmt="fp4", seed=4, head_fp8=stored)
    return made


@pytest.fixture(scope="module")
def runs(folders: dict[tuple[str, str], Path]) -> Iterator[dict[str, EngineRun]]:
    specs = []
    for shape, fmt in CASES:
        folder = folders[shape, fmt]
        asked = prompts(_vocab(folder))
        spec = EngineSpec(
            f"{shape}-{fmt}", str(folder), asked, first_logits=True, options={"lm_head": "bf16"}
        )
        specs.append(spec)
    for stored in ("row", "block"):
        folder = folders["head", stored]
        specs.append(EngineSpec(f"head-{stored}", str(folder), prompts(_vocab(folder)), first_logits=True))
    fp4 = str(folders["flash", "fp4"])
    asked = prompts(_vocab(folders["flash", "fp4"]))
    on_bytes = {"lm_head": "bf16", "moe": "reference"}
    specs.append(EngineSpec("flash-fp4-reference", fp4, asked, first_logits=True, options=on_bytes))
    yield {run.name: run for run in run_engines(specs)}


def _vocab(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.mark.parametrize(("shape", "fmt"), CASES)
def test_engine_equals_reference(
    shape: str, fmt: str, folders: dict[tuple[str, str], Path], runs: dict[str, EngineRun]
) -> None:
    folder = folders[shape, fmt]
    exact = reference_logits(folder, prompts(_vocab(folder)))
    assert relative_rms(runs[f"{shape}-{fmt}"].logits, exact) < FP32_RMS


@pytest.mark.parametrize("stored", ["row", "block"])
def test_stored_fp8_head_is_loaded_as_it_is(
    stored: str, folders: dict[tuple[str, str], Path], runs: dict[str, EngineRun]
) -> None:
    folder, run = folders["head", stored], runs[f"head-{stored}"]
    assert run.status["choices"]["lm_head"]["choice"] == f"fp8_{stored}"
    assert relative_rms(run.logits, reference_logits(folder, prompts(_vocab(folder)))) < FP32_RMS


def test_packed_experts_equal_dequantized(runs: dict[str, EngineRun]) -> None:
    packed, dense = runs["flash-fp4-reference"], runs["flash-fp4"]
    assert packed.status["choices"]["moe mxfp4"]["choice"] == "reference"
    assert dense.status["choices"]["moe mxfp4"]["choice"] == "torch"
    assert relative_rms(packed.logits, dense.logits) < FP32_RMS


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4", "int4"])
@pytest.mark.parametrize(
    "control", [{"ignore_clamps": True}, {"drop_expert": (3, 0)}], ids=["clamps", "expert"]
)
def test_wrong_reference_is_noticed(
    fmt: str, control: dict[str, object], folders: dict[tuple[str, str], Path], runs: dict[str, EngineRun]
) -> None:
    folder = folders["flash", fmt]
    wrong = reference_logits(folder, prompts(_vocab(folder)), **control)
    assert relative_rms(runs[f"flash-{fmt}"].logits, wrong) > 10 * FP32_RMS


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.2.attention.dense.weight_scale_inv",
        "model.layers.3.mlp.experts.{expert}.down_proj.weight_scale_inv",
        "model.layers.1.mlp.shared_experts.gate_proj.weight_scale_inv",
    ],
)
def test_one_scale_off_is_noticed(
    tensor: str, folders: dict[tuple[str, str], Path], runs: dict[str, EngineRun], tmp_path: Path
) -> None:
    folder = folders["flash", "fp4"]
    broken = _with_scale_doubled(folder, tmp_path, tensor)
    wrong = reference_logits(broken, prompts(_vocab(folder)))
    assert relative_rms(runs["flash-fp4"].logits, wrong) > 10 * FP32_RMS


def _with_scale_doubled(folder: Path, target: Path, pattern: str) -> Path:
    """A copy of the checkpoint in which the scales of one tensor (of every expert) are off by one exponent."""
    prefix, _, suffix = pattern.partition("{expert}")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.startswith(prefix) and name.endswith(suffix or prefix):
                tensors[name] = (tensor.view(torch.uint8) + 1).view(tensor.dtype)
        save_file(tensors, target / file.name)
    return target
