# SPDX-License-Identifier: Apache-2.0
"""Writes a LingReference as a BF16 checkpoint with the official tensor names and safetensors shards."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_ling.reference.model import LingReference

# Official checkpoints keep these in float32; everything else is bfloat16.
FLOAT32_SUFFIXES = ("A_log", "dt_bias", "expert_bias")


def official_state_dict(model: LingReference) -> dict[str, Tensor]:
    """Official tensor names -> contiguous CPU tensors, BF16 except for `FLOAT32_SUFFIXES`."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if name.endswith(FLOAT32_SUFFIXES) else torch.bfloat16
        value = value.detach().to("cpu", dtype)
        if ".mlp.experts." in name:
            prefix, projection = name.rsplit(".", 1)
            for expert, weight in enumerate(value):
                tensors[f"{prefix}.{expert}.{projection}.weight"] = weight.contiguous()
        else:
            tensors[name] = value.contiguous()
    return tensors


def save_checkpoint(
    model: LingReference, config: Mapping[str, Any], out_dir: str | Path, shard_bytes: int = 5_000_000_000
) -> None:
    """Writes `config.json`, `model-*.safetensors` of at most `shard_bytes` each, and their index.

    config: the `config.json` contents to store, without a quantization_config.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in official_state_dict(model).items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(out / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (out / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
