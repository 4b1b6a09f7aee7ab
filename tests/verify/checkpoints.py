# SPDX-License-Identifier: Apache-2.0
"""Copies of tiny-ling with one thing changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.quant.row_fp8 import quantize_row_fp8

EXPERT = "model.layers.5.mlp.experts.3.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> Path:
    """tiny-ling in `folder` after `change` of its tensors; the index goes, since names may come and go."""
    shutil.copytree(tiny_ling_path(), folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    change(tensors)
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def fp8_head(factor: float = 1.0, rows: int = 1024) -> Callable[[Tensors], None]:
    """Stores the head in FP8 with row scales, those of the first `rows` rows wrong by `factor`."""

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"], scale = quantize_row_fp8(tensors["lm_head.weight"].float())
        scale[:rows] *= factor
        tensors["lm_head.weight_scale"] = scale

    return change


def flipped_bytes(tensors: Tensors) -> None:
    """Every bit of one expert matrix."""
    tensors[EXPERT] = tensors[EXPERT] ^ 0xFF


def one_flipped_byte(tensors: Tensors) -> None:
    """The smallest damage there is."""
    tensors[EXPERT][7, 11] ^= 0x10


def larger_scales(tensors: Tensors) -> None:
    """One expert matrix 256 times too large."""
    scale = tensors[f"{EXPERT}_scale_inv"]
    tensors[f"{EXPERT}_scale_inv"] = (scale.view(torch.uint8) + 8).view(scale.dtype)


def hub_layout(root: Path, source: Path) -> Path:
    """A snapshot folder as a hub download leaves it: links to blobs that are named by their SHA-256."""
    import hashlib

    blobs, snapshot = root / "blobs", root / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot
