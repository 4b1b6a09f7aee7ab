# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling tune`: what it builds, twice, and what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_ling.cli import app
from vllm_ling.decode.kda_step import KdaShape
from vllm_ling.decode.mla_prepare import MlaShape
from vllm_ling.decode.shapes import fused_problem, fused_shapes
from vllm_ling.errors import LingError
from vllm_ling.quant.fp8_gemv import GemvShape
from vllm_ling.quant.tune import GPUS, gemv_shapes, jobs, moe_shape
from vllm_ling.roofline.models import model_shape


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("VLLM_LING_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tune(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["tune", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.output


def test_second_run_compiles_nothing(cache: Path) -> None:
    first = tune("tiny-ling", "--gpu", "h200")
    files = sorted(cache.rglob("*.cubin"))
    second = tune("tiny-ling", "--gpu", "h200")
    assert len(files) > 8 and f"{len(files)} kernels compiled, 0 were there" in " ".join(first.split())
    assert f"0 kernels compiled, {len(files)} were there" in " ".join(second.split())
    assert sorted(cache.rglob("*.cubin")) == files
    # What is left out is said: two heads are fewer than the MLA kernel's four warps.
    assert "left out: fused decode path: 2 heads are not a multiple of 4" in " ".join(first.split())


def test_flash_has_the_matrices_that_decoding_reads() -> None:
    shapes = gemv_shapes(model_shape("flash"))
    assert GemvShape(157184, 2560, True) in shapes and GemvShape(12288, 2560, False) in shapes
    assert GemvShape(2560, 5120, False) in shapes, "eh_proj of the MTP layer"
    assert len(shapes) == len(set(shapes))
    assert moe_shape(model_shape("flash")).experts == 512


def test_flash_has_the_kernels_of_the_fused_path() -> None:
    """tests/cpu/test_fused_shapes.py derives the same from vLLM's modules."""
    asked = fused_shapes(model_shape("flash"))
    assert set(asked.gemv) == {
        GemvShape(20480, 2560, False, prologue="norm", parts=(12288, 4096, 4096)),
        GemvShape(2560, 4096, False),
        GemvShape(6720, 2560, False, prologue="norm", parts=(6144, 576)),
        GemvShape(2560, 4096, False, prologue="gated"),
        GemvShape(12288, 2560, False, prologue="norm"),
        GemvShape(2560, 6144, False, prologue="swiglu"),
        GemvShape(2560, 5120, False, prologue="joined"),
    }
    assert asked.kda == KdaShape(32, 2560) and asked.mla == MlaShape(32, 2560)


def test_every_kernel_of_the_fused_path_is_a_job() -> None:
    """One for each token count that serving compiles, under the same defines."""
    found = [job for job in jobs(model_shape("flash"), GPUS["h200"]) if job.defines]
    kda = [job.defines["TOKENS"] for job in found if job.defines and job.source == "kda_step.cu"]
    assert kda == [1, 2, 4, 8]
    assert [job.defines for job in found if job.source == "mla_prepare.cu"] == [
        {"HEADS": 32, "HIDDEN": 2560, "NOPE": 128, "ROPE": 64, "LATENT": 512, "USE_PDL": 1}
    ]
    gemvs = [job.defines for job in found if job.defines and job.source == "fp8_gemv.cu"]
    for prologue, k, second, third in (
        (1, 2560, 12288 // 16, 16384 // 16),
        (1, 2560, 6144 // 16, 1 << 30),
        (1, 2560, 1 << 30, 1 << 30),
        (2, 6144, 1 << 30, 1 << 30),
        (3, 4096, 1 << 30, 1 << 30),
    ):
        wanted = {"PROLOGUE": prologue, "K": k, "SECOND": second, "THIRD": third}
        assert {d["TOKENS"] for d in gemvs if wanted.items() <= d.items()} == {1, 4, 8, 16}, wanted
    joined = [d for d in gemvs if d["PROLOGUE"] == 4]
    assert {(d["K"], d["TOKENS"]) for d in joined} == {(5120, 1), (5120, 4), (5120, 8)}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fmt": "fp8"}, "not FP4"),
        ({"layer_group_size": 64}, "no KDA layer"),
        ({"short_conv_kernel_size": 3}, "over 3 tokens"),
        ({"q_lora_rank": 1536}, "q_lora_rank"),
        ({"mla_gate": "element_wise"}, "one number per head"),
        ({"v_head_dim": 64}, "one number per head"),
        ({"num_attention_heads": 30}, "30 heads"),
        ({"hidden_size": 2560 + 128}, "hidden size 2688"),
        ({"excluded": ()}, "attention.b_proj is quantized"),
        ({"excluded": ("b_proj",)}, "5.attention.g_proj is quantized"),
        ({"excluded": (*model_shape("flash").excluded, "eh_proj")}, "42.eh_proj is not quantized"),
        ({"excluded": (*model_shape("flash").excluded, "1.mlp.down_proj")}, "down_proj is not quantized"),
        ({"excluded": (*model_shape("flash").excluded, "0.attention.f_proj")}, "f_proj is not quantized"),
    ],
)
def test_a_model_that_vllm_decodes_gets_no_fused_kernels(change: dict[str, Any], word: str) -> None:
    flash = model_shape("flash")
    assert fused_problem(flash) is None
    shape = dataclasses.replace(flash, **change)
    assert word in (fused_problem(shape) or "")
    found = list(jobs(shape, GPUS["h200"]))
    (left_out,) = (job for job in found if job.label == "fused decode path")
    assert word in left_out.problem and left_out.defines is None
    assert not {"kda_step.cu", "mla_prepare.cu"} & {job.source for job in found}


@pytest.mark.parametrize("name", GPUS)
def test_every_named_gpu_serves_four_tokens(name: str) -> None:
    """Verification of three drafts; what a card has no room for says so."""
    found = list(jobs(model_shape("flash"), GPUS[name]))
    missing = {job.label: job.problem for job in found if job.defines is None}
    assert all("shared memory" in problem for problem in missing.values())
    assert all(label.endswith((", 8 tokens", ", 16 tokens")) for label in missing)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["flash", "--gpu", "b200"], "--gpu b200: not one of"),
        (["nowhere", "--gpu", "h200"], "nowhere"),
        (["flash"], "no CUDA device"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LingError, match=word):
        tune(*arguments)


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_LING_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(LingError, match="VLLM_LING_CACHE_DIR"):
        tune("tiny-ling", "--gpu", "h200")
