# SPDX-License-Identifier: Apache-2.0
"""What the converter refuses, in one line, and without touching the target."""

import errno
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint_files import SMALL, declared_tensors, single_thread, write_checkpoint
from vllm_ling.checkpoint.synthetic import make_checkpoint, mini_config
from vllm_ling.errors import LingError
from vllm_ling.quant import convert

__all__ = ["single_thread"]
pytestmark = pytest.mark.usefixtures("single_thread")
BF16 = mini_config("flash", "bf16", mtp=True, clamp=4) | SMALL


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Headers of a BF16 checkpoint; its data are holes, that is zeros."""
    return write_checkpoint(tmp_path / "src", BF16, declared_tensors(BF16))


def refused(src: Path, dst: Path, fmt: str = "fp4", **options: Any) -> str:
    """The message of the LingError that must come."""
    with pytest.raises(LingError) as raised:
        convert.run(src, dst, fmt, console=Console(file=io.StringIO()), **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_unknown_options(src: Path, tmp_path: Path) -> None:
    assert (
        refused(src, tmp_path / "dst", "nvfp4")
        == "--format nvfp4: unknown format, expected one of fp8, fp4, int4"
    )
    assert refused(src, tmp_path / "dst", "bf16").startswith("--format bf16: ")
    assert refused(src, tmp_path / "dst", head="fp4").startswith("--head fp4: ")
    assert not (tmp_path / "dst").exists()


def test_sources_that_are_no_bf16_checkpoint(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    for fmt in ("fp8", "fp4", "int4"):
        config = mini_config("tiny", fmt, mtp=False, clamp=4)
        quantized = write_checkpoint(tmp_path / fmt, config, declared_tensors(config))
        assert f"{quantized}: already quantized ({fmt})" in refused(quantized, dst)
    row = make_checkpoint(tmp_path / "row", "tiny", "bf16", mtp=False, head_fp8="row", **SMALL)
    assert "lm_head.weight is already FP8" in refused(row, dst)
    assert "config.json: no such file" in refused(tmp_path / "absent", dst)
    (src / "config.json").write_text(json.dumps(BF16 | {"architectures": ["LlamaForCausalLM"]}))
    assert "architectures" in refused(src, dst)
    (src / "config.json").write_text(json.dumps(BF16 | {"num_experts": 8}))
    assert "num_experts is 8, but the checkpoint holds 4" in refused(src, dst)
    assert not dst.exists()


def test_a_truncated_source(src: Path, tmp_path: Path) -> None:
    shard = min(src.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    assert f"{shard.name}: truncated shard: 1 bytes are missing" in refused(src, tmp_path / "dst")


def test_targets_that_overlap_the_source(src: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(src)
    for dst in (
        src,
        src / "fp4",
        tmp_path / "link",
        tmp_path / "link" / "deep" / "fp4",
        tmp_path / "x" / ".." / "src",
    ):
        assert "must lie outside the source" in refused(src, dst)
    before = sorted(path.name for path in src.iterdir())
    (tmp_path / "link").unlink()
    assert f"not empty (it holds {src.name})" in refused(src, tmp_path)
    assert sorted(path.name for path in src.iterdir()) == before


def test_targets_in_use(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    dst.write_text("a file")
    assert "exists and is not a folder" in refused(src, dst)
    dst.unlink()
    (dst / "folder").mkdir(parents=True)
    assert "not empty (it holds folder); choose a new or empty folder" in refused(src, dst)
    assert [path.name for path in dst.iterdir()] == ["folder"]
    (dst / "folder").rmdir()
    convert.run(src, dst, "fp4", console=Console(file=io.StringIO()))
    # A finished checkpoint is nobody's leftover.
    assert "not empty (it holds config.json)" in refused(src, dst)


def test_too_little_disk_space(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    assert "MB of disk space, only 1.00 MB are free" in refused(src, tmp_path / "dst")
    assert not list((tmp_path / "dst").glob("*.safetensors*"))


def test_the_space_estimate_is_enough_and_not_much_more(src: Path, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        message = refused(src, tmp_path / "dst", "int4")
    wanted = float(message.split("needs ")[1].split(" MB")[0]) * 1e6
    convert.run(src, tmp_path / "dst", "int4", console=Console(file=io.StringIO()))
    used = sum(path.stat().st_size for path in (tmp_path / "dst").iterdir())
    assert used <= wanted + 10_000
    assert wanted < used * 1.1


@pytest.mark.parametrize("fmt", ["fp4", "int4"])
def test_experts_that_do_not_divide(tmp_path: Path, fmt: str) -> None:
    config = BF16 | {"moe_intermediate_size": 48}
    src = write_checkpoint(tmp_path / "src", config, declared_tensors(config))
    message = refused(src, tmp_path / "dst", fmt)
    assert (
        message.startswith("model.layers.1.mlp.experts.0.down_proj.weight: ") and "divisible by 32" in message
    )
    convert.run(src, tmp_path / "fp8", "fp8", console=Console(file=io.StringIO()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.0.attention.A_log"])
def test_not_finite_is_named(tmp_path: Path, name: str, bad: float) -> None:
    src = make_checkpoint(tmp_path / "src", "tiny", "bf16", mtp=False, shards=1, **SMALL)
    (file,) = src.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = bad
    save_file(tensors, file)
    assert refused(src, tmp_path / "dst").endswith(f"{file.name}: {name} holds NaN or Inf")
    assert not list((tmp_path / "dst").glob("*.safetensors*"))


def test_a_full_disk_is_one_line(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, "_write_shard", full)
    assert (
        refused(src, tmp_path / "dst")
        == f"{tmp_path / 'dst'}: No space left on device; finished shards are kept"
    )
