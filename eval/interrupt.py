# SPDX-License-Identifier: Apache-2.0
"""Long commands end in order: Ctrl-C and SIGTERM alike stop the servers and keep what is finished."""

import signal
from collections.abc import Callable
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


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which goes the way of Ctrl-C."""


def _terminate(*_: Any) -> NoReturn:
    raise _Terminated
