# SPDX-License-Identifier: Apache-2.0
"""Which lines of a log are looked at: those of the last server start and the last ones, whatever the file's size.

Of a file above HEAD + TAIL bytes, HEAD bytes from the last start on and the last TAIL bytes are read. Everything that
a start says stands at its beginning, and what serving says lately at the end; a start that has been superseded must not
be taken for the one that runs.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

HEAD = TAIL = 16 << 20
LINE = 1 << 16
# How far back from the end the last start is looked for.
SEARCH = 4 << 30
_CHUNK = 4 << 20
# Colours and the like, as a log from a terminal or a container holds them.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines(file: BinaryIO, size: int, start_mark: bytes) -> Iterator[bytes]:
    """The lines to look at, first the last start's, then the end's; of a line longer than LINE only the beginning."""
    if size <= HEAD + TAIL:
        yield from _bounded(file, size)
        return
    start = _last_start(file, size, start_mark)
    if start is None and size <= SEARCH:
        start = 0
    if start is not None:
        file.seek(start)
        yield from _bounded(file, HEAD)
    file.seek(size - TAIL if start is None else max(start + HEAD, size - TAIL))
    yield from _bounded(file, TAIL)


def text(raw: bytes) -> str:
    """A line as text, without line end and colours."""
    return _ESCAPES.sub("", raw.decode("utf-8", errors="replace")).rstrip("\r\n")


def _last_start(file: BinaryIO, size: int, mark: bytes) -> int | None:
    """Where the line with the last `mark` begins (at most 4 KB before it); None if it is not within SEARCH."""
    end = size
    while end > max(0, size - SEARCH):
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        found = file.read(min(end - begin + len(mark) - 1, size - begin)).rfind(mark)
        if found >= 0:
            place = begin + found
            before = max(0, place - 4096)
            file.seek(before)
            return before + file.read(place - before).rfind(b"\n") + 1
        end = begin
    return None


def _bounded(file: BinaryIO, budget: int) -> Iterator[bytes]:
    fresh = True
    while budget > 0 and (line := file.readline(min(LINE, budget))):
        budget -= len(line)
        if fresh:
            yield line
        fresh = line.endswith(b"\n")
