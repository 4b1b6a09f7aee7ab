# SPDX-License-Identifier: Apache-2.0
"""Progress in bytes: a bar with speed and remaining time on a terminal, one plain line per shard elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def gigabytes(size: float) -> str:
    """Decimal units, as model cards use them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def say(console: Console, line: str) -> None:
    """Prints one line as it is: no markup, no wrapping."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class ByteProgress:
    """Context manager; `done` bytes of `total` were finished by an earlier run and do not count for the speed."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self._console, self._total, self._skipped, self._done = console, total, done, done
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "ByteProgress":
        self._start = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def describe(self, text: str) -> None:
        """Says which part begins."""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            done = f"{gigabytes(self._done)} of {gigabytes(self._total)} done"
            say(self._console, f"{text}: {done}{self._remaining()}")

    def advance(self, size: int) -> None:
        """Counts `size` more bytes as done."""
        self._done += size
        self._bar.advance(self._task, size)

    def _remaining(self) -> str:
        fresh = self._done - self._skipped
        if not fresh:
            return ""
        seconds = (time.monotonic() - self._start) * (self._total - self._done) / fresh
        return f", about {seconds:.0f} s left"
