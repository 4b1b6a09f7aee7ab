# SPDX-License-Identifier: Apache-2.0
"""What a run has finished so far, one line per item, so that a crash or Ctrl-C loses nothing that was answered.

The first line holds the settings that the answers depend on; a run with other settings must not continue the file.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_ling.errors import LingError


def beside(out: Path, suffix: str) -> Path:
    """The file beside the result `out` that is named after it; only a .json gives way to the suffix."""
    return out.with_name(out.name.removesuffix(".json") + suffix)


_START = b'{"settings": '


class Journal:
    """An append-only file; use it as a context manager.

    Attributes:
        entries: what is finished, by item id; a later line of the same id replaces an earlier one.

    Args:
        path: created if missing.
        settings: what must be the same for the answers to be comparable, as plain JSON data.
        restart: throw an existing file away.

    Raises:
        LingError: the file belongs to other settings (naming the first that differs), is none of ours, another run is
            writing to it, or it cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        wanted = json.loads(json.dumps(dict(settings)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise LingError(f"{path}: {error.strerror}; choose another --out") from None
        try:
            _lock(self._file, path)
            self._open(wanted, restart)
        except LingError:
            self._file.close()
            raise

    def _open(self, wanted: dict[str, Any], restart: bool) -> None:
        if restart:
            self._file.truncate(0)
        self._file.seek(0)
        # A line without its end was cut off by a crash; its item is asked again.
        whole, newline, cut = self._file.read().rpartition(b"\n")
        lines = whole.splitlines()
        if lines:
            self._check(lines[0], wanted)
            self._read(lines[1:])
        elif not cut.startswith(_START[: len(cut)]):
            raise _foreign(self.path)
        self._file.truncate(len(whole) + len(newline))
        if not lines:
            self._write({"settings": wanted})

    def _check(self, line: bytes, wanted: dict[str, Any]) -> None:
        found = _parse(line, self.path, 1).get("settings")
        if not isinstance(found, dict):
            raise _foreign(self.path)
        for name in sorted({*wanted, *found}):
            if found.get(name) != wanted.get(name):
                raise LingError(
                    f"{self.path}: an unfinished run with {name} = {found.get(name)!r}, now {wanted.get(name)!r}; "
                    "go on with the old settings, or start afresh with --restart"
                )

    def _read(self, lines: list[bytes]) -> None:
        for number, line in enumerate(lines, 2):
            entry = _parse(line, self.path, number)
            if not isinstance(entry.get("id"), str):
                raise LingError(f"{self.path}: line {number} has no id; start afresh with --restart")
            self.entries[entry["id"]] = entry

    def add(self, entry: Mapping[str, Any]) -> None:
        """Records a finished item (`id` and more, plain JSON data); it is on the disk when this returns."""
        self._write(entry)
        self.entries[entry["id"]] = dict(entry)

    def _write(self, content: Mapping[str, Any]) -> None:
        line, end = json.dumps(content).encode() + b"\n", self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # half a line would spoil all that come after it
            raise LingError(
                f"{self.path}: {error.strerror}; what was finished before is kept, and once the file can be written, "
                "the same command goes on from there"
            ) from None

    def finish(self, out: Path) -> None:
        """Gives the file its final name: the answers behind the result `out`, to be read, not to be continued."""
        self.path.replace(beside(out, ".answers.jsonl"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _foreign(path: Path) -> LingError:
    return LingError(f"{path}: not a journal of this program; move it away or choose another --out")


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LingError(f"{path}: line {number} is not readable; start afresh with --restart")
    return found


def _lock(file: Any, path: Path) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LingError(f"{path}: another run is writing to it") from None
