# SPDX-License-Identifier: Apache-2.0
"""Long commands end in order: Ctrl-C and SIGTERM alike stop the servers and keep what is finished."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def interruptible(work: Callable[[], int], kept: str) -> int:
    """Runs `work` and returns its exit code; after Ctrl-C or SIGTERM 128 + the signal, with `kept` said."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return work()
    except KeyboardInterrupt as stop:
        print(f"stopped; {kept}")
        return 128 + (signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block, in which a process is started that nobody would know else.

    Other threads than the main one are never interrupted, and nothing is held there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda found, _: came.append(found))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for found in came:
            signal.raise_signal(found)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which goes the way of Ctrl-C."""


def _terminate(*_: Any) -> NoReturn:
    raise _Terminated
