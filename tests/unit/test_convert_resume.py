# SPDX-License-Identifier: Apache-2.0
"""Interrupted conversions: resumed ones are byte-identical, changed ones start over, damaged shards are made again."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint_files import SMALL, single_thread
from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.errors import LingError
from vllm_ling.quant import convert
from vllm_ling.quant.convert_plan import encode
from vllm_ling.quant.convert_target import MANIFEST

__all__ = ["single_thread"]
pytestmark = pytest.mark.usefixtures("single_thread")
SHARD_BYTES = 500_000


@pytest.fixture
def src(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "src", "flash", "bf16", **SMALL)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def whole(src: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of an uninterrupted conversion."""
    quantize(src, tmp_path / "whole")
    return contents(tmp_path / "whole")


def quantize(src: Path, dst: Path, fmt: str = "fp4", **options: Any) -> str:
    out = io.StringIO()
    convert.run(src, dst, fmt, console=Console(file=out), **{"shard_bytes": SHARD_BYTES, **options})
    return out.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int, act: Callable[[], Any]) -> None:
    """Lets `act` happen when the tensor number `call` is about to be encoded."""
    calls = iter(range(1_000_000))

    def counted(*args: Any) -> Any:
        if next(calls) == call:
            act()
        return encode(*args)

    monkeypatch.setattr(convert, "encode", counted)


def interrupt(src: Path, dst: Path, error: BaseException | None = None, call: int = 30) -> str:
    """A conversion that fails in its middle; returns what it printed."""

    error = error or RuntimeError("stop")

    def act() -> None:
        raise error

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):
        stop_at(patch, call, act)
        convert.run(src, dst, "fp4", console=Console(file=out), shard_bytes=SHARD_BYTES)
    return out.getvalue()


def shards(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("call", [0, 30, 60])
def test_a_failed_conversion_resumes_byte_identical(
    src: Path, whole: dict[str, bytes], tmp_path: Path, call: int
) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst, call=call)
    kept = shards(dst)
    assert set(contents(dst)) == {MANIFEST, *kept}
    assert bool(kept) == (call > 0)
    assert ("resuming" in quantize(src, dst)) == (call > 0)
    assert contents(dst) == whole
    assert kept.items() <= shards(dst).items(), "finished shards are not written again"


def test_a_failure_after_the_last_shard(src: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LingError, match="no copy today"):
        patch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(5, "no copy today")))
        quantize(src, dst)
    kept = shards(dst)
    assert set(contents(dst)) == {MANIFEST, *kept}
    assert kept.keys() == {name for name in whole if name.endswith(".safetensors")}
    quantize(src, dst)
    assert contents(dst) == whole
    assert kept == shards(dst)


def test_ctrl_c_says_how_to_go_on(src: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    printed = interrupt(src, tmp_path / "dst", KeyboardInterrupt())
    assert "--resume" in printed.splitlines()[-1]
    quantize(src, tmp_path / "dst")
    assert contents(tmp_path / "dst") == whole


def test_a_killed_process_resumes_byte_identical(src: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    dst = tmp_path / "dst"
    script = f"""
import os, signal, sys
from pathlib import Path
from vllm_ling.quant import convert

encode, calls = convert.encode, iter(range(1_000_000))

def counted(*args):
    if next(calls) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*args)

convert.encode = counted
convert.run(Path(sys.argv[1]), Path(sys.argv[2]), "fp4", shard_bytes={SHARD_BYTES})
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(src), str(dst)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    kept = shards(dst)
    assert kept and len([name for name in contents(dst) if name.endswith(".partial")]) == 1
    assert "resuming" in quantize(src, dst)
    assert contents(dst) == whole
    assert kept.items() <= shards(dst).items()


def test_a_torn_shard_is_made_again(src: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    torn = min(dst.glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-1])
    quantize(src, dst)
    assert contents(dst) == whole


def test_a_changed_source_starts_over(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    changed = max(src.glob("*.safetensors"))
    tensors = load_file(changed)
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, changed)
    assert f"starting over: the source has changed ({changed.name})" in quantize(src, dst)
    quantize(src, tmp_path / "fresh")
    assert contents(dst) == contents(tmp_path / "fresh")


def test_a_touched_source_starts_over(src: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupt(src, tmp_path / "dst")
    os.utime(src / "tokenizer.json", ns=(1, 1))
    assert "the source has changed (tokenizer.json)" in quantize(src, tmp_path / "dst")
    assert contents(tmp_path / "dst") == whole


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fmt": "fp8"}, "format is fp8, it was fp4"),
        ({"head": "fp8"}, "head is fp8, it was bf16"),
        ({"shard_bytes": 10_000_000}, f"shard_bytes is 10000000, it was {SHARD_BYTES}"),
        ({"resume": False}, "resuming was not asked for"),
    ],
)
def test_a_changed_option_starts_over(
    src: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    assert f"starting over: {reason}" in quantize(src, dst, **options)
    quantize(src, tmp_path / "fresh", **options)
    assert contents(dst) == contents(tmp_path / "fresh")


def test_a_strangers_file_is_never_removed(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    before = shards(dst)
    (dst / "thesis.txt").write_text("years of work")
    for options in ({}, {"resume": False}, {"fmt": "int4"}):
        with pytest.raises(LingError, match=r"not empty \(it holds thesis\.txt\)"):
            quantize(src, dst, **options)
    assert shards(dst) == before and (dst / "thesis.txt").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"files": ["../src/config.json"], "source": [], "options": {}}'],
)
def test_a_damaged_manifest_is_refused(src: Path, tmp_path: Path, text: str) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    (dst / MANIFEST).write_text(text)
    with pytest.raises(LingError, match=rf"{MANIFEST}: unreadable manifest"):
        quantize(src, dst)
    assert (src / "config.json").exists()


def test_files_that_an_older_plan_left_are_removed(
    src: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    manifest = json.loads((dst / MANIFEST).read_text())
    manifest["files"].append("model-00001-of-00099.safetensors")
    (dst / MANIFEST).write_text(json.dumps(manifest))
    (dst / "model-00001-of-00099.safetensors").write_bytes(b"old")
    quantize(src, dst)
    assert contents(dst) == whole


def test_an_error_in_a_tensor_keeps_the_finished_shards(src: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    (file,) = [file for file in src.glob("*.safetensors") if name in load_file(file)]
    tensors = load_file(file)
    tensors[name][5, 7] = torch.nan
    save_file(tensors, file)
    with pytest.raises(LingError, match=rf"{file.name}: {name} holds NaN or Inf"):
        quantize(src, tmp_path / "dst")
    assert set(contents(tmp_path / "dst")) == {MANIFEST, *shards(tmp_path / "dst")}
    assert shards(tmp_path / "dst")
