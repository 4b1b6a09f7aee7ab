# SPDX-License-Identifier: Apache-2.0
"""Reads text to count tokens in, piece by piece: plain files, or JSON lines with the usual fields."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vllm_ling.errors import LingError

FIELDS = ("text", "prompt", "question", "answer", "messages")
_PIECE = 1 << 16  # characters


def check_text_file(path: Path) -> None:
    """Refuses what could only be counted wrongly.

    Raises:
        LingError: naming the file.
    """
    if not path.is_file():
        raise LingError(f"{path}: no such file")
    if path.suffix == ".json":
        raise LingError(
            f"{path}: JSON would be counted with its punctuation; give JSON lines (.jsonl) or plain text"
        )


def read_texts(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Pieces of a file as (bytes read, texts): of its content, or of `FIELDS` in each line of a .jsonl file.

    Raises:
        LingError: naming the file and line.
    """
    lines = path.suffix in (".jsonl", ".ndjson")
    number = 0
    try:
        # Line ends stay as they are: they are tokens too.
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.readline() if lines else _piece(file):
                number += 1
                yield len(piece.encode()), _fields(piece, f"{path}, line {number}") if lines else [piece]
    except UnicodeDecodeError:
        raise LingError(f"{path}: not UTF-8 text") from None


def _piece(file: TextIO) -> str:
    """Text up to the first line end after `_PIECE` characters, or twice as much if there is none."""
    text = file.read(_PIECE)
    return text + file.readline(_PIECE) if len(text) == _PIECE else text


def _fields(line: str, where: str) -> list[str]:
    if not line.strip():
        return []
    try:
        row = json.loads(line)
    except ValueError as error:
        raise LingError(f"{where}: not JSON: {error}") from None
    found = [row[name] for name in FIELDS if name in row] if isinstance(row, dict) else []
    if not found:
        raise LingError(f"{where}: expected an object with one of the fields {', '.join(FIELDS)}")
    try:
        return [text for value in found for text in _texts(value)]
    except TypeError as error:
        raise LingError(f"{where}: {error} where text or messages were expected") from None


def _texts(value: Any) -> Iterator[str]:
    """Strings in a field: itself, or those of messages and their parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from _texts(value.get("content", value.get("text")))
    elif value is not None:
        raise TypeError(repr(value))
