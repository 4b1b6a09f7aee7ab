# SPDX-License-Identifier: Apache-2.0
"""Bad input to `vllm-ling serve` ends in one error line naming the option, file or tensor, before weights are read."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vllm_ling.checkpoint.synthetic import make_checkpoint

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sound"), fmt="fp4", shards=2)


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def serve(*args: str) -> str:
    """Runs the command, which must fail at once; returns its only error line."""
    command = [sys.executable, "-m", "vllm_ling.cli", "serve", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("vllm-ling: error: "), done.stderr[-2000:]
    return lines[0]


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def drop_tensor(folder: Path, name: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


SCALE = "model.layers.3.mlp.experts.7.down_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["model-00002-of-00002.safetensors", "truncated", "1,000 bytes"]),
        (lambda folder: drop_tensor(folder, SCALE), [SCALE, "missing"]),
        (lambda folder: edit_config(folder, num_experts=32), ["num_experts is 32", "16 experts"]),
        (lambda folder: edit_config(folder, tie_word_embeddings=True), ["tie_word_embeddings"]),
    ],
    ids=["truncated shard", "missing scale", "expert count", "tied head"],
)
def test_broken_checkpoint(broken: Path, damage: Callable[[Path], None], words: list[str]) -> None:
    damage(broken)
    message = serve(str(broken))
    assert all(word in message for word in words), message


def test_unknown_option(sound: Path) -> None:
    message = serve(str(sound), "--additional-config", '{"ling": {"lm_haed": "fp8"}}')
    assert "unknown option ling.lm_haed" in message


def test_quantization_by_hand(sound: Path) -> None:
    message = serve(str(sound), "--quantization", "fp8")
    assert "--quantization fp8" in message and "quantization_config" in message
