# SPDX-License-Identifier: Apache-2.0
"""Header reading: what a sound folder says, and one error naming the file for each kind of damage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.checkpoint_files import write_file
from vllm_ling.checkpoint.headers import INDEX, TensorInfo, read_file_header, read_headers, read_index
from vllm_ling.errors import LingError

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def test_a_file_written_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "f32": torch.zeros(2, 3),
        "bf16": torch.zeros(5, dtype=torch.bfloat16),
        "e4m3": torch.zeros(3, 3).to(torch.float8_e4m3fn),
        "e8m0": torch.ones(7).to(torch.float8_e8m0fnu),
        "i64": torch.tensor([1, 2]),
        "u8": torch.zeros(4, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_headers(tmp_path)
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in found.items()} == {
        "f32": ("F32", (2, 3), 24),
        "bf16": ("BF16", (5,), 10),
        "e4m3": ("F8_E4M3", (3, 3), 9),
        "e8m0": ("F8_E8M0", (7,), 7),
        "i64": ("I64", (2,), 16),
        "u8": ("U8", (4,), 4),
        "none": ("F32", (0, 4), 0),
    }
    assert {info.file for info in found.values()} == {"x.safetensors"}


def test_offsets_are_kept(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"b": B, "__metadata__": {"format": "pt"}, "a": A}, 32)
    assert read_file_header(tmp_path / "x.safetensors") == {
        "a": TensorInfo("x.safetensors", "F32", (2, 3), 0, 24),
        "b": TensorInfo("x.safetensors", "BF16", (4,), 24, 32),
    }


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"a": A, "b": B}, 32)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(LingError, match=r"x\.safetensors: truncated"):
            read_file_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(LingError, match="1 bytes too many"):
        read_file_header(path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_hostile_header_length_is_not_believed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
    with pytest.raises(LingError, match=rf"header of {length} in 110 bytes"):
        read_file_header(path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"not json at all", "is not JSON"),
        (b'{"a": ', "is not JSON"),
        (b"\xff\xfe\x00\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "is not an object"),
        (b"null", "is not an object"),
    ],
)
def test_a_header_that_is_no_json_object(tmp_path: Path, header: bytes, problem: str) -> None:
    write_file(tmp_path / "x.safetensors", header, 32)
    with pytest.raises(LingError, match=rf"x\.safetensors: the safetensors header {problem}"):
        read_file_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        7,
        [],
        {},
        A | {"dtype": "F33"},
        A | {"dtype": ["F32"]},
        A | {"dtype": None},
        A | {"shape": 6},
        A | {"shape": [2, -3]},
        A | {"shape": [2.0, 3]},
        A | {"shape": [2, True]},
        A | {"shape": [2**63, 2**63]},
        A | {"shape": [2, 4]},
        A | {"data_offsets": [0]},
        A | {"data_offsets": [0, 24, 48]},
        A | {"data_offsets": [24, 0]},
        A | {"data_offsets": [-24, 0]},
        A | {"data_offsets": [2**63, 2**63 + 24]},
        A | {"data_offsets": "ab"},
    ],
)
def test_a_malformed_entry_is_named(tmp_path: Path, entry: Any) -> None:
    write_file(tmp_path / "x.safetensors", {"a": entry}, 24)
    with pytest.raises(LingError, match=r"x\.safetensors: malformed header entry for a$"):
        read_file_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("begin", "problem"), [(20, "overlap"), (28, "gap")])
def test_overlaps_and_gaps(tmp_path: Path, begin: int, problem: str) -> None:
    late = B | {"data_offsets": [begin, begin + 8]}
    write_file(tmp_path / "x.safetensors", {"a": A, problem: late}, begin + 8)
    with pytest.raises(LingError, match=f"{problem} starts at byte {begin} where 24 was expected"):
        read_file_header(tmp_path / "x.safetensors")


def two_shards(folder: Path, **index: str) -> Path:
    write_file(folder / "one.safetensors", {"a": A}, 24)
    write_file(folder / "two.safetensors", {"b": B | {"data_offsets": [0, 8]}}, 8)
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"} | index
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_of_an_index(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    write_file(folder / "leftover.safetensors", {"a": A}, 24)
    assert {name: info.file for name, info in read_headers(folder).items()} == read_index(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (two_shards(tmp_path) / "two.safetensors").unlink()
    with pytest.raises(LingError, match=r"two\.safetensors: shard is missing"):
        read_headers(tmp_path)


@pytest.mark.parametrize("index", [{"a": "two.safetensors"}, {"c": "one.safetensors"}])
def test_an_index_that_lies(tmp_path: Path, index: dict[str, str]) -> None:
    ((name, file),) = index.items()
    with pytest.raises(LingError, match=rf"{INDEX} places {name} in {file}, but that shard does not hold it"):
        read_headers(two_shards(tmp_path, **index))


def test_a_tensor_stored_twice(tmp_path: Path) -> None:
    for file in ("one", "two"):
        write_file(tmp_path / f"{file}.safetensors", {"a": A}, 24)
    with pytest.raises(LingError, match=r"a: stored twice, in one\.safetensors and two\.safetensors"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "file", ["../two.safetensors", "/etc/two.safetensors", "sub/two.safetensors", "..", ""]
)
def test_a_shard_name_never_leaves_the_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "inside").mkdir()
    write_file(tmp_path / "two.safetensors", {"b": B | {"data_offsets": [0, 8]}}, 8)
    with pytest.raises(LingError, match=r"leaves the folder|cannot be read"):
        read_headers(two_shards(tmp_path / "inside", b=file))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(LingError, match=f"{INDEX}: "):
        read_headers(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(LingError, match=r"no \.safetensors files"):
        read_headers(tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(LingError, match=r"x\.safetensors: (cannot be read|truncated)"):
        read_headers(tmp_path)
