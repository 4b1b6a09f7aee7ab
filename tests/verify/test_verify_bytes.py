# SPDX-License-Identifier: Apache-2.0
"""Parts `head` and `kernels` on damaged copies of tiny-ling: what each comparison sees, and what it cannot see.

Two computations on the same bytes agree however wrong the bytes are. So damage is found against another source or a
digest, or, if it is a factor, by scales that stand out; the tests also show that the same-bytes figures stay silent.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verify.checkpoints import (
    EXPERT,
    changed,
    flipped_bytes,
    fp8_head,
    hub_layout,
    larger_scales,
    one_flipped_byte,
)
from vllm_ling.bench.layers import random_moe_layer
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.quant.decode_moe import MoEShape, MoEWeights
from vllm_ling.quant.layout import from_fragments
from vllm_ling.quant.moe_reference import moe_reference
from vllm_ling.quant.tune import moe_shape
from vllm_ling.reference.load import StoredTensors
from vllm_ling.verify import gpu_kernels, head, kernels
from vllm_ling.verify.real_layers import RealLayer
from vllm_ling.verify.settings import Verification


def look(part: Any, model: Path | str, reference: Path | str = "", **more: Any) -> Any:
    return part.run(Verification(str(model), reference=str(reference), task="tiny_ling", layers=2, **more))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_head_of_tiny_ling_is_sound_on_random_and_real_states() -> None:
    finding = look(head, "tiny-ling")
    assert finding.outcome == "ok" and "512 real hidden states" in finding.evidence
    assert 0.02 < finding.figures["random hidden states"]["rms"] < 0.04


def test_stored_fp8_head_needs_the_bf16_head_beside_it(tmp_path: Path) -> None:
    folder = changed(tmp_path / "m", fp8_head())
    alone = look(head, folder)
    assert alone.outcome == "unknown" and "no BF16 head to compare with" in alone.evidence
    assert "--reference" in alone.fix
    beside = look(head, folder, "tiny-ling")
    assert beside.outcome == "ok" and "fp8_row" in beside.evidence


@pytest.mark.parametrize(("factor", "rows"), [(2.0, 1024), (4.0, 100), (float("nan"), 1)])
def test_wrong_head_scale_is_found(tmp_path: Path, factor: float, rows: int) -> None:
    finding = look(head, changed(tmp_path / "m", fp8_head(factor, rows)), "tiny-ling")
    assert finding.outcome == "fail"
    assert "FP8 head drifts from the BF16 head" in finding.evidence and "lm_head" in finding.fix


def test_a_head_that_fp8_cannot_hold_is_found(tmp_path: Path) -> None:
    """One large value per row takes the whole range of E4M3."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:, 7] = 1e5

    finding = look(head, changed(tmp_path / "m", change))
    assert finding.outcome == "fail" and "drifts" in finding.evidence


def test_kernels_on_the_cpu_are_unknown_with_the_torch_paths_compared() -> None:
    finding = look(kernels, "tiny-ling")
    assert finding.outcome == "unknown" and "no NVIDIA GPU here" in finding.evidence
    assert "the same bytes" in finding.evidence and "GPU" in finding.fix
    errors = [error for row in finding.figures["layers"].values() for error in row["torch"].values()]
    assert len(errors) == 8 and max(errors) < 1e-2


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("moe_torch.TorchMoEMethod", "layer 5: the torch path (torch float32) is 0.02"),
        ("head_fp8.HeadFp8Method", "lm_head: the torch path (bfloat16) is 0.02"),
    ],
)
def test_a_wrong_torch_path_is_found(monkeypatch: pytest.MonkeyPatch, where: str, said: str) -> None:
    """Here the computation is at fault, not the bytes: results are 2% too large."""
    module, name = where.split(".")
    method: Any = getattr(importlib.import_module(f"vllm_ling.quant.{module}"), name)
    right = method.apply
    monkeypatch.setattr(method, "apply", lambda *args: right(*args) * 1.02)
    finding = look(kernels, "tiny-ling")
    assert finding.outcome == "fail" and said in finding.evidence, finding.evidence


@pytest.mark.parametrize("damage", [flipped_bytes, one_flipped_byte, larger_scales])
def test_damage_is_found_against_another_download_and_invisible_without(tmp_path: Path, damage: Any) -> None:
    folder = changed(tmp_path / "m", damage)
    finding = look(kernels, folder, "tiny-ling")
    assert finding.outcome == "fail", finding.evidence
    assert EXPERT in finding.evidence and "from --reference" in finding.evidence
    assert "download" in finding.fix
    errors = [error for row in finding.figures["layers"].values() for error in row["torch"].values()]
    assert max(errors) < 1e-2, "a comparison on the same bytes cannot see it"
    alone = look(kernels, folder)
    assert alone.outcome == ("warn" if damage is larger_scales else "unknown")
    if damage is larger_scales:
        assert f"{EXPERT}_scale_inv: largest scale 2" in alone.evidence and "--reference" in alone.fix
    else:
        assert "bytes changed on the way show in gsm8k only" in alone.evidence


def test_quantized_experts_against_their_original_need_more_than_rounding(tmp_path: Path) -> None:
    """`--reference` may hold the original before quantization: MXFP4's own loss passes, damage does not."""
    import json

    original = changed(tmp_path / "bf16")
    config = json.loads((original / "config.json").read_text())
    config.pop("quantization_config")
    (original / "config.json").write_text(json.dumps(config))
    from safetensors.torch import load_file, save_file

    (shard,) = original.glob("*.safetensors")
    stored = StoredTensors(tiny_ling_path())
    generator = torch.Generator().manual_seed(0)
    dense = {}
    for name in load_file(shard):
        if name.endswith("_scale_inv"):
            continue
        value = stored.weight(name)
        if ".mlp." in name and "gate." not in name:  # what the rounding of an original would have removed
            step = value.abs().amax(-1, keepdim=True) / 12
            value = value + step * (torch.rand(value.shape, generator=generator) - 0.5)
        dense[name] = value.bfloat16()
    save_file(dense, shard, metadata={"format": "pt"})
    sound = look(kernels, "tiny-ling", original)
    assert sound.outcome == "unknown", sound.evidence
    assert 0.01 < sound.figures["layers"]["5"]["to_other_source"] < 0.2
    for damage in (flipped_bytes, larger_scales):
        finding = look(kernels, changed(tmp_path / damage.__name__, damage), original)
        assert finding.outcome == "fail" and EXPERT in finding.evidence


def test_a_hub_download_is_checked_against_its_digests(tmp_path: Path) -> None:
    folder = hub_layout(tmp_path / "hub", tiny_ling_path())
    sound = look(kernels, folder)
    assert sound.outcome == "unknown" and "1 of 1 shards read have the digest of the hub" in sound.evidence
    shard = next(folder.glob("*.safetensors")).resolve()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    damaged = look(kernels, folder)
    assert damaged.outcome == "fail" and "SHA-256" in damaged.evidence and "download" in damaged.fix


class MoEKernel:
    """What MoEDecoder promises, in torch, on the layout that it is given."""

    max_tokens = 8

    def __init__(self, shape: MoEShape, *_: Any) -> None:
        self.shape = shape

    def __call__(
        self, x: Any, w: MoEWeights, out: Any, scaling: float, limit: float, shared_limit: float
    ) -> Any:
        return out.copy_(moe_reference(self.shape, x, w, scaling, limit, shared_limit))


class Product:
    """What Fp8Gemv promises, in torch."""

    def __init__(self, shape: Any, *_: Any) -> None:
        self.shape = shape

    def __call__(self, x: Any, weight: Any, scales: Any, out: Any) -> Any:
        from vllm_ling.quant.block_fp8 import dequantize_block_fp8

        if self.shape.row_scales:
            logits = (x.float() @ weight.float().T) * scales
        else:
            logits = x.float() @ dequantize_block_fp8(weight, scales).T
        return out.copy_(logits.argmax(-1) if self.shape.argmax else logits)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough experts for the kernel, and clamps that bite."""
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "m", fmt="fp4", num_experts=32, clamp=0.3)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MoEDecoder", MoEKernel), ("Fp8Gemv", Product), ("gpu_of", lambda device: None)):
        monkeypatch.setattr(gpu_kernels, name, value)


def gpu_figures(model: Path) -> dict[str, float]:
    """The GPU comparisons with stand-ins for the kernels, on the CPU."""
    what, device = Verification(str(model)), torch.device("cpu")
    stored = StoredTensors(what.folder)
    layer = RealLayer(stored, kernels._config(what), 5)
    found, missing = gpu_kernels.moe_errors(layer, what.shape, device)
    more, also_missing = gpu_kernels.head_errors(stored, device)
    assert not missing and not also_missing
    return found | more


def test_sound_gpu_kernels_pass(stand_ins: None, wide: Path) -> None:
    figures = gpu_figures(wide)
    assert len(figures) == 6 and gpu_kernels.beyond("layer 5", figures) == []
    assert set(figures) >= {"moe_block, 1 tokens", "moe_block, 4 tokens", "head product, 4 tokens"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("MoEDecoder", lambda out: out.mul_(1.01), "moe_block, 4 tokens"),
        ("MoEDecoder", lambda out: out[-1:].zero_(), "moe_block, 1 tokens"),
        ("Fp8Gemv", lambda out: out.mul_(1.01) if out.is_floating_point() else out, "head product"),
        ("Fp8Gemv", lambda out: out if out.is_floating_point() else out.add_(1), "head argmax, wrong tokens"),
    ],
)
def test_wrong_gpu_kernels_are_found(
    stand_ins: None, wide: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, said: str
) -> None:
    sound: Any = getattr(gpu_kernels, name)

    class Wrong(sound):  # type: ignore[misc]
        def __call__(self, x: Any, w: Any, *args: Any) -> Any:
            out = super().__call__(x, w, *args)
            change(out)
            return out

    monkeypatch.setattr(gpu_kernels, name, Wrong)
    problems = gpu_kernels.beyond("layer 5", gpu_figures(wide))
    assert problems and all(kind == "fail" for kind, _ in problems)
    assert any(said in text and "from the fp32 reference" in text for _, text in problems), problems


def test_a_wrong_layout_of_the_kernel_is_found(
    stand_ins: None, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference reads the checkpoint, not the repacked experts."""
    right = gpu_kernels.to_fragments

    def swapped(codes: torch.Tensor) -> torch.Tensor:
        return right(codes).flip(1)

    monkeypatch.setattr(gpu_kernels, "to_fragments", swapped)
    problems = gpu_kernels.beyond("layer 5", gpu_figures(wide))
    assert any("moe_block" in text for _, text in problems)


def test_kernel_weights_are_the_checkpoints(wide: Path) -> None:
    what = Verification(str(wide))
    layer = RealLayer(StoredTensors(what.folder), kernels._config(what), 5)
    weights = gpu_kernels.kernel_weights(layer, torch.device("cpu"))
    like = random_moe_layer(moe_shape(what.shape), torch.device("cpu"))
    for name in ("w13", "s13", "w2", "s2", "shared_w13", "shared_s13", "shared_w2", "shared_s2", "gate"):
        one, other = getattr(weights, name), getattr(like, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
    stored = layer.stored.read(EXPERT)
    assert torch.equal(from_fragments(weights.w13)[3, 128:], stored)


def test_a_shape_that_the_kernel_does_not_serve_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RealLayer(StoredTensors(tiny_ling_path()), kernels._config(Verification("tiny-ling")), 5)
    monkeypatch.setattr(gpu_kernels, "Fp8Gemv", Product)
    monkeypatch.setattr(gpu_kernels, "gpu_of", lambda device: None)
    _, missing = gpu_kernels.moe_errors(layer, Verification("tiny-ling").shape, torch.device("cpu"))
    assert missing == [
        "the MoE kernel does not serve this shape: 16 experts: not a multiple of 32 up to 1024"
    ]


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4"])
def test_every_format_has_its_torch_path_compared(tmp_path: Path, fmt: str) -> None:
    finding = look(kernels, make_checkpoint(tmp_path / "m", fmt=fmt, clamp=0.3))
    assert finding.outcome == "unknown" and "torch paths on layers 1, 5" in finding.evidence, finding.evidence


@pytest.mark.parametrize("stored", ["row", "block"])
def test_stored_fp8_heads_have_their_path_compared(tmp_path: Path, stored: Any) -> None:
    finding = look(kernels, make_checkpoint(tmp_path / "m", head_fp8=stored))
    assert finding.outcome == "unknown" and finding.figures["head"]["bfloat16"] < 1e-2, finding.evidence
    assert finding.figures["head"]["float32"] < 1e-5


def test_signed_bytes_are_the_same_codes(tmp_path: Path) -> None:
    """Some writers store the packed codes as I8."""

    def signed(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]:
            tensors[name] = tensors[name].view(torch.int8)

    finding = look(kernels, changed(tmp_path / "m", signed), "tiny-ling")
    assert finding.outcome == "unknown", finding.evidence
    assert finding.figures["layers"]["5"]["to_other_source"] == 0
