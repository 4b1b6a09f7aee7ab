# SPDX-License-Identifier: Apache-2.0
"""Conversion: every tensor bit-equal to its codec, official layout, companion files, report."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.unit.checkpoint_files import SMALL, single_thread
from vllm_ling import cli
from vllm_ling.checkpoint.headers import INDEX, read_headers
from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.checkpoint.validate import validate_checkpoint
from vllm_ling.quant.block_fp8 import quantize_block_fp8
from vllm_ling.quant.convert import run
from vllm_ling.quant.int4 import quantize_int4
from vllm_ling.quant.mxfp4 import quantize_mxfp4
from vllm_ling.quant.row_fp8 import quantize_row_fp8
from vllm_ling.reference.load import from_checkpoint

__all__ = ["single_thread"]
pytestmark = pytest.mark.usefixtures("single_thread")
KDA, MLA, MOE = "model.layers.0.attention", "model.layers.1.attention", "model.layers.1.mlp"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bf16")
    return {
        "flash": make_checkpoint(folder / "flash", "flash", "bf16", **SMALL),
        "tiny": make_checkpoint(folder / "tiny", "tiny", "bf16", mtp=False, **SMALL),
    }


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.dtype == right.dtype and left.shape == right.shape
    return same and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def convert(src: Path, dst: Path, fmt: str, **options: Any) -> str:
    """Runs quietly; returns what was printed."""
    out = io.StringIO()
    run(src, dst, fmt, console=Console(file=out, width=60), **options)
    return out.getvalue()


def expected_outputs(name: str, weight: torch.Tensor, fmt: str, shape: str, head: str) -> Iterator[Any]:
    """The official layout, written down independently of the converter."""
    module, _, leaf = name.rpartition(".")
    part = module.rpartition(".")[2]
    block = [
        "q_proj",
        "k_proj",
        "v_proj",
        "f_proj",
        "o_proj",
        "dense",
        "gate_proj",
        "up_proj",
        "down_proj",
        "eh_proj",
    ]
    lora = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    is_block = part in block or (part in lora and shape == "flash") or module == f"{KDA}.g_proj"
    if name == "lm_head.weight" and head == "fp8":
        codes, scale = quantize_row_fp8(weight)
        yield from ((name, codes), ("lm_head.weight_scale", scale))
    elif ".experts." in name and fmt == "int4":
        packed, scale = quantize_int4(weight)
        yield from ((f"{name}_packed", packed), (f"{name}_scale", scale))
        yield f"{name}_shape", torch.tensor(weight.shape)
    elif ".experts." in name and fmt == "fp4":
        yield from zip((name, f"{name}_scale_inv"), quantize_mxfp4(weight), strict=True)
    elif is_block and fmt != "int4":
        codes, scale = quantize_block_fp8(weight)
        yield from ((name, codes), (f"{name}_scale_inv", scale.to(torch.float8_e8m0fnu)))
    else:
        assert leaf in ("A_log", "dt_bias", "expert_bias") or weight.dtype == torch.bfloat16
        yield name, weight


@pytest.mark.parametrize(
    ("fmt", "head"), [("fp8", "bf16"), ("fp4", "bf16"), ("fp4", "fp8"), ("int4", "bf16")]
)
@pytest.mark.parametrize("shape", ["flash", "tiny"])
def test_every_tensor_is_bit_equal_to_its_codec(
    tmp_path: Path, sources: dict[str, Path], shape: str, fmt: str, head: str
) -> None:
    convert(sources[shape], tmp_path / "out", fmt, head=head)
    stored = tensors_of(tmp_path / "out")
    for name, weight in tensors_of(sources[shape]).items():
        for key, value in expected_outputs(name, weight, fmt, shape, head):
            assert same_bits(stored.pop(key), value), key
    assert not stored
    facts = validate_checkpoint(tmp_path / "out")
    assert (facts.fmt, facts.has_mtp) == (fmt, shape == "flash")
    assert facts.head_scale == ("row" if head == "fp8" else "none")


def test_the_reference_model_reads_the_result(tmp_path: Path, sources: dict[str, Path]) -> None:
    exact = from_checkpoint(sources["flash"]).state_dict()
    for fmt, error in (("fp8", 0.04), ("fp4", 0.14), ("int4", 0.14)):
        convert(sources["flash"], tmp_path / fmt, fmt)
        for name, value in from_checkpoint(tmp_path / fmt).state_dict().items():
            off = (value - exact[name]).norm() / exact[name].norm()
            assert off < error, name
            if "norm" in name or "word_embeddings" in name:
                assert off == 0, name


def test_the_config_declares_the_format(tmp_path: Path, sources: dict[str, Path]) -> None:
    for shape, fmt in (("flash", "fp4"), ("tiny", "fp8"), ("flash", "int4")):
        convert(sources[shape], tmp_path / fmt, fmt)
        config = json.loads((tmp_path / fmt / "config.json").read_text())
        section = config.pop("quantization_config")
        assert config == json.loads((sources[shape] / "config.json").read_text())
        if fmt == "fp4":
            assert section["modules_to_not_convert"] == ["b_proj", "1.attention.g_proj", "2.attention.g_proj"]
            assert section["routed_experts_quant_method"] == "mxfp4"
            assert section["routed_experts_group_size"] == 32
            assert (section["quant_method"], section["scale_fmt"]) == ("fp8", "ue8m0")
        elif fmt == "fp8":
            lora = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
            excluded = ["b_proj", "1.attention.g_proj", *(f"1.attention.{name}" for name in lora)]
            assert section["modules_to_not_convert"] == excluded
            assert "routed_experts_quant_method" not in section
        else:
            assert (section["quant_method"], section["format"]) == ("compressed-tensors", "pack-quantized")


def test_shards_respect_their_limit_and_the_index(tmp_path: Path, sources: dict[str, Path]) -> None:
    limit = 200_000
    convert(sources["flash"], tmp_path, "fp4", shard_bytes=limit)
    headers = read_headers(tmp_path)
    files: dict[str, list[str]] = {}
    for name, info in headers.items():
        files.setdefault(info.file, []).append(name)
    assert len(files) > 8
    assert sorted(files) == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    for names in files.values():
        weights = {name.replace("_scale_inv", "") for name in names}
        assert sum(headers[name].nbytes for name in names) <= limit or len(weights) == 1
    for name, info in headers.items():
        if name.endswith("_scale_inv"):
            assert headers[name.removesuffix("_scale_inv")].file == info.file
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {name: info.file for name, info in headers.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in headers.values())


def test_the_result_does_not_depend_on_the_sources_shards(tmp_path: Path, sources: dict[str, Path]) -> None:
    single = tmp_path / "single"
    single.mkdir()
    (single / "config.json").write_bytes((sources["tiny"] / "config.json").read_bytes())
    save_file(tensors_of(sources["tiny"]), single / "model.safetensors")
    convert(single, tmp_path / "a", "fp4", shard_bytes=1_000_000)
    convert(sources["tiny"], tmp_path / "b", "fp4", shard_bytes=1_000_000)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_companions_are_copied_and_permissions_are_plain(tmp_path: Path, sources: dict[str, Path]) -> None:
    src, dst, elsewhere = tmp_path / "src", tmp_path / "deep" / "dst", tmp_path / "blob"
    src.mkdir()
    for path in sources["tiny"].iterdir():
        (src / path.name).symlink_to(path)
    elsewhere.write_text("{{ messages }}")
    (src / "chat_template.jinja").symlink_to(elsewhere)
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        (src / name).write_text(name)
    for name in ("pytorch_model.bin", "consolidated.safetensors", ".gitattributes"):
        (src / name).write_text("not for the copy")
    (src / "figures").mkdir()
    before = os.umask(0o077)
    try:
        convert(src, dst, "fp4")
    finally:
        os.umask(before)
    assert sorted(path.name for path in dst.iterdir()) == [
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        INDEX,
        "tokenizer.json",
    ]
    assert (dst / "chat_template.jinja").read_text() == "{{ messages }}"
    assert all(path.stat().st_mode & 0o777 == 0o644 and not path.is_symlink() for path in dst.iterdir())


def test_declared_but_absent_mtp_layers(tmp_path: Path) -> None:
    src = make_checkpoint(tmp_path / "src", "flash", "bf16", mtp=False, **SMALL)
    config = json.loads((src / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (src / "config.json").write_text(json.dumps(config))
    convert(src, tmp_path / "dst", "fp4")
    facts = validate_checkpoint(tmp_path / "dst")
    assert not facts.has_mtp and facts.shape.num_nextn_predict_layers == 1


def test_plain_progress_and_report(tmp_path: Path, sources: dict[str, Path]) -> None:
    lines = convert(sources["flash"], tmp_path / "dst", "fp4", head="fp8", shard_bytes=1_000_000).splitlines()
    assert lines[0].startswith("shard 1 of ") and "0.00 MB of" in lines[0]
    assert any("s left" in line for line in lines[1:])
    sizes = {words[0]: words[1:] for words in (line.split() for line in lines) if "->" in words}
    facts = validate_checkpoint(tmp_path / "dst")
    assert set(sizes) == {*facts.bytes_by_role, "total"}
    assert sizes["experts"] == ["1.57", "MB", "->", "0.42", "MB"]
    assert sizes["total"][3:5] == [f"{facts.total_bytes / 1e6:.2f}", "MB"]
    assert "FP8 head needs vllm-ling" in lines[-1]


def test_a_terminal_gets_a_bar(tmp_path: Path, sources: dict[str, Path]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    run(sources["tiny"], tmp_path / "dst", "fp8", console=console)
    assert "━" in out.getvalue() and "shard 1 of 1" in out.getvalue()


def test_the_command(tmp_path: Path, sources: dict[str, Path]) -> None:
    words = ["quantize", str(sources["tiny"]), str(tmp_path / "dst"), "--format", "fp4", "--head", "fp8"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "fp4) in" in result.output
    assert validate_checkpoint(tmp_path / "dst").head_scale == "row"
