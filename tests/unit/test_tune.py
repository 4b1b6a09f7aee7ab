# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling tune`: what it builds, twice, and what it refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ling.cli import app
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


def test_flash_has_the_matrices_that_decoding_reads() -> None:
    shapes = gemv_shapes(model_shape("flash"))
    assert GemvShape(157184, 2560, True) in shapes and GemvShape(12288, 2560, False) in shapes
    assert GemvShape(2560, 5120, False) in shapes, "eh_proj of the MTP layer"
    assert len(shapes) == len(set(shapes))
    assert moe_shape(model_shape("flash")).experts == 512


@pytest.mark.parametrize("name", GPUS)
def test_every_named_gpu_serves_four_tokens(name: str) -> None:
    """Verification of three drafts; what a card has no room for says so."""
    found = list(jobs(model_shape("flash"), GPUS[name]))
    missing = {job.label: job.problem for job in found if job.defines is None}
    assert all("shared memory" in problem for problem in missing.values())
    assert not any(
        label.startswith("MoE block") and not label.startswith("MoE block, 8") for label in missing
    )


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
