# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors headers only: names, dtypes, shapes and byte ranges, with every size checked against the file."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ling.errors import LingError

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 * 2**20
_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class TensorInfo(NamedTuple):
    """Where one tensor lies: bytes [begin, end) after the header of `file`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Header facts of every tensor of a checkpoint folder.

    Raises:
        LingError: a shard is missing, truncated or malformed, or disagrees with the index; names the file.
    """
    index = read_index(folder)
    files = (
        sorted(set(index.values())) if index else sorted(path.name for path in folder.glob("*.safetensors"))
    )
    if not files:
        raise LingError(f"{folder}: no .safetensors files")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        shard = read_file_header(folder / file)
        if twice := tensors.keys() & shard.keys():
            name = min(twice)
            raise LingError(f"{name}: stored twice, in {tensors[name].file} and {file}")
        tensors |= shard
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            raise LingError(f"{INDEX} places {name} in {file}, but that shard does not hold it")
    return tensors


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard file; empty without an index file."""
    path = folder / INDEX
    if not path.exists():
        return {}
    if not path.is_file() or path.stat().st_size > _MAX_HEADER:  # a pipe would be waited for without end
        raise LingError(f"{path}: not a safetensors index (not a file, or above {_MAX_HEADER >> 20} MB)")
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LingError(f"{path}: not a safetensors index ({type(error).__name__})") from None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise LingError(f"{path}: weight_map must map tensor names to file names")
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise LingError(f"{path}: shard name {file!r} leaves the folder")
    return weight_map


def read_file_header(path: Path) -> dict[str, TensorInfo]:
    """Header facts of one safetensors file, checked against its size.

    Raises:
        LingError: naming the file and what to do.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe would be waited for without end
            raise LingError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if length < 2 or length > min(_MAX_HEADER, size - 8):
                raise LingError(
                    f"{path}: truncated or not a safetensors file (header of {length} in {size} bytes)"
                )
            entries = json.loads(file.read(length))
    except FileNotFoundError:
        raise LingError(f"{path}: shard is missing; download the checkpoint again") from None
    except OSError as error:
        raise LingError(f"{path}: cannot be read ({error.strerror})") from None
    except LingError:
        raise
    except (ValueError, RecursionError):
        raise LingError(f"{path}: the safetensors header is not JSON") from None
    if not isinstance(entries, dict):
        raise LingError(f"{path}: the safetensors header is not an object")
    entries.pop("__metadata__", None)
    file_name = path.name
    tensors = {name: _tensor(path, file_name, name, entry) for name, entry in entries.items()}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != end:
            raise LingError(f"{path}: {name} starts at byte {info.begin} where {end} was expected")
        end = info.end
    if size != 8 + length + end:
        missing = 8 + length + end - size
        problem = f"{missing:,} bytes are missing" if missing > 0 else f"{-missing:,} bytes too many"
        raise LingError(f"{path}: truncated shard: {problem}; download this file again")
    return tensors


def _tensor(path: Path, file_name: str, name: str, entry: Any) -> TensorInfo:
    """Checks one entry. Runs once per tensor, 127,000 times for Ling-3.0-flash, hence without generators."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        sound = type(dtype) is str and set(map(type, numbers)) == {int}
        sound = sound and min(numbers) >= 0 and max(numbers) < 2**62
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or dtype not in _BYTES or end - begin != prod(shape) * _BYTES[dtype]:
        raise LingError(f"{path}: malformed header entry for {name}")
    return TensorInfo(file_name, dtype, shape, begin, end)
