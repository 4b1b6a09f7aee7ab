# SPDX-License-Identifier: Apache-2.0
"""Shared by the checkpoint and conversion tests: checkpoints of headers alone, and one torch thread."""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from vllm_ling.checkpoint.headers import INDEX
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.tensors import expected_tensors

ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}
Tensors = dict[str, tuple[str, tuple[int, ...]]]

# Overrides that leave one KDA layer with a dense block and one MLA layer with four experts.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Small tensors on a busy machine: threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def declared_tensors(config: Mapping[str, Any]) -> Tensors:
    """Name -> (dtype, shape) of every tensor that the config declares, in the first dtype allowed."""
    specs = expected_tensors(LingShape.from_config(config))
    return {name: (spec.dtypes[0], spec.shape) for name, spec in specs.items()}


def header_of(tensors: Tensors) -> dict[str, Any]:
    """A safetensors header with the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return header


def write_file(path: Path, header: Any, data_bytes: int) -> None:
    """A safetensors file with any header and a hole of `data_bytes` for the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + data_bytes)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 2) -> Path:
    """config.json, shards without data, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(1, shards + 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number - 1 :: shards]}
        size = sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in part.values())
        write_file(folder / file, header_of(part), size)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
