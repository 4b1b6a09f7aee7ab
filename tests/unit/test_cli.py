# SPDX-License-Identifier: Apache-2.0
"""The command line: one error line, exit codes, arguments that reach the server unchanged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import vllm_ling
from vllm_ling import cli
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.errors import LingError

runner = CliRunner()


def vllm_ling_command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would, in a process of its own."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "vllm_ling.cli", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_version_names_both_packages() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"vllm-ling {vllm_ling.__version__} (vLLM ")


def test_tiny_path_prints_an_existing_folder(tmp_path: Path) -> None:
    done = vllm_ling_command("tiny-path", cwd=tmp_path)
    assert done.returncode == 0
    assert (Path(done.stdout.strip()) / "config.json").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["MODEL", "--port", "8000", "-tp", "2", "-O3"],
        ["--help"],
        ["--help=ModelConfig"],
        ["MODEL", "--", "--version"],
        ["--model=x", "--additional-config.ling.lm_head", "fp8", "--speculative-config", '{"method":"mtp"}'],
    ],
)
def test_serve_passes_every_argument_on(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("vllm_ling.serve.serve", lambda argv: seen.append(list(argv)))
    result = runner.invoke(cli.app, ["serve", *words])
    assert result.exit_code == 0, result.output
    assert seen == [words]


def test_a_ling_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Any) -> None:
        raise LingError("first line\nsecond line")

    monkeypatch.setattr("vllm_ling.serve.serve", refuse)
    monkeypatch.setattr(sys, "argv", ["vllm-ling", "serve", "x"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "vllm-ling: error: first line second line\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "tiny-ling", "--additional-config", '{"ling": {"lm_haed": "fp8"}}'], "ling.lm_haed"),
        (["serve", "tiny-ling", '--additional_config={"ling": {"moe": "fast"}}'], "ling.moe='fast'"),
        (["serve", "CHECKPOINT", "--quantization", "fp8"], "--quantization fp8"),
        (["quantize", "no-such-folder", "out"], "no-such-folder"),
        (["demo", "--stages", "mtp,all"], "--stages: unknown stage all"),
        (["demo", "--items", "301"], "--items 301"),
    ],
)
def test_bad_input_is_named_before_anything_heavy_starts(
    words: list[str], named: str, tmp_path: Path
) -> None:
    config = {"architectures": ["BailingMoeV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "CHECKPOINT").mkdir()
    (tmp_path / "CHECKPOINT" / "config.json").write_text(json.dumps(config))
    done = vllm_ling_command(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-ling: error: ") and named in line
    assert [path.name for path in tmp_path.iterdir()] == ["CHECKPOINT"]


def damaged(folder: Path, how: str) -> Path:
    """A copy of tiny-ling with one thing wrong."""
    model = Path(shutil.copytree(tiny_ling_path(), folder / "model"))
    (shard,) = model.glob("*.safetensors")
    config = json.loads((model / "config.json").read_text())
    if how == "truncated shard":
        os.truncate(shard, shard.stat().st_size // 2)
    elif how == "missing scale":
        tensors = load_file(shard)
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
        save_file(tensors, shard)
        (model / "model.safetensors.index.json").unlink()
    elif how == "wrong expert count":
        (model / "config.json").write_text(json.dumps(config | {"num_experts": 32}))
    elif how == "tied head":
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return model


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("truncated shard", ".safetensors"),
        ("missing scale", "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"),
        ("wrong expert count", "num_experts"),
        ("tied head", "tie_word_embeddings"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line_without_starting_vllm(
    how: str, named: str, tmp_path: Path
) -> None:
    done = vllm_ling_command("serve", str(damaged(tmp_path, how)), cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-ling: error: ") and named in line
