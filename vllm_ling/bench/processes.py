# SPDX-License-Identifier: Apache-2.0
"""Runs a measuring program to its end or its time limit, and leaves nothing of it on the GPU."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_NEWS_S = 20.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RUNNING: "set[subprocess.Popen[bytes]]" = set()
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """In the child: the kernel ends it if we are ended in a way that runs no code of ours (SIGTERM, SIGKILL)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_all() -> None:
    """Ends what `run_limited` runs in other threads: Ctrl-C reaches the main thread alone, and they would wait on."""
    for child in list(_RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def run_limited(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float,
    news: Callable[[float], None] | None = None,
) -> int | None:
    """Runs `command` with its output in `log`. Returns its exit code, None if it was ended at the limit.

    It gets a session of its own: a profiler's child would outlive the profiler and keep the GPU's memory. `news` is
    called every 20 seconds with those that have passed.
    """
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        _RUNNING.add(child)
        try:
            while (left := began + timeout_s - time.monotonic()) > 0:
                try:
                    return child.wait(min(left, _NEWS_S))
                except subprocess.TimeoutExpired:
                    if news is not None and left > _NEWS_S:
                        news(time.monotonic() - began)
            return None
        finally:
            # Also after Ctrl-C, which does not reach another session, and for what a finished program left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            _RUNNING.discard(child)
