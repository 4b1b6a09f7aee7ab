# SPDX-License-Identifier: Apache-2.0
"""What a run has finished so far, one line per item, so that a crash or Ctrl-C loses nothing that was answered.

The first line holds the settings that the answers depend on; a run with other settings must not continue the file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_ling.errors import LingError


class Journal:
    """An append-only file; use it as a context manager.

    Attributes:
        entries: what is finished, by item id; a later line of the same id replaces an earlier one.

    Args:
        path: created if missing.
        settings: what must be the same for the answers to be comparable, as plain JSON data.
        restart: throw an existing file away.

    Raises:
        LingError: the file belongs to other settings (naming the first that differs), is none of ours, or another run
            is writing to it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        wanted = json.loads(json.dumps(dict(settings)))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
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
        whole, newline, _ = self._file.read().rpartition(b"\n")
        self._file.truncate(len(whole) + len(newline))
        lines = whole.splitlines()
        if lines:
            self._check(lines[0], wanted)
            self._read(lines[1:])
        else:
            self._write({"settings": wanted})

    def _check(self, line: bytes, wanted: dict[str, Any]) -> None:
        found = _parse(line, self.path, 1).get("settings")
        if not isinstance(found, dict):
            raise LingError(
                f"{self.path}: not a journal of this program; move it away or choose another --out"
            )
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
        self.entries[entry["id"]] = dict(entry)
        self._write(entry)

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, path: Path) -> None:
        """Gives the file its final name: the answers behind a result, to be read, not to be continued."""
        self.path.replace(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


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
