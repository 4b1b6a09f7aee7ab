# SPDX-License-Identifier: Apache-2.0
"""How a long run goes: a bar with the time left on a terminal, a line now and then where the output is a file."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY_S = 30.0


class RunProgress:
    """Counts items, with decode speed, accept length and errors so far; use it as a context manager."""

    def __init__(self, what: str, console: Console | None = None) -> None:
        self.what = what
        self.console = console or Console(stderr=True, highlight=False)
        self.total = self.done = self.errors = 0
        self._tokens = self._seconds = 0.0
        self._drafts = self._accepted = 0
        self._started = self._told = time.monotonic()
        self._resumed = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=None, figures="")

    def begin(self, total: int, finished: int) -> None:
        """Starts counting; `finished` items come from an earlier run."""
        self.total, self.done, self._resumed = total, finished, finished
        self._started = self._told = time.monotonic()
        self._bar.update(self._task, total=total, completed=finished)
        if finished:
            self.say(f"{self.what}: {finished} of {total} items are finished already")

    def item(self, entry: Mapping[str, Any]) -> None:
        """One more item is finished, as its journal entry says."""
        self.done += 1
        self.errors += bool(entry.get("error"))
        if entry.get("tpot_ms"):
            first = (entry.get("chunks") or [1])[0]
            self._tokens += entry["output_tokens"] - first
            self._seconds += entry["latency_s"] - entry["ttft_s"]
        self._drafts += entry.get("drafts") or 0
        self._accepted += entry.get("accepted") or 0
        self._bar.update(self._task, completed=self.done, figures=self.figures())
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._told >= _EVERY_S or self.done == self.total):
            self._told = now
            left = (now - self._started) / max(1, self.done - self._resumed) * (self.total - self.done)
            self.say(f"{self.what}: {self.done} of {self.total}, {left:.0f} s left, {self.figures()}")

    def figures(self) -> str:
        """Speed, accept length and errors of the items of this run."""
        parts = [f"{self._tokens / self._seconds:.1f} tok/s"] if self._seconds else []
        if self._drafts:
            parts.append(f"accept length {1 + self._accepted / self._drafts:.2f}")
        if self.errors:
            parts.append(f"{self.errors} errors")
        return ", ".join(parts)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
