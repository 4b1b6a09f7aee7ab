# SPDX-License-Identifier: Apache-2.0
"""Runs a measuring program to its end or its time limit, and leaves nothing of it on the GPU."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_NEWS_S = 20.0
_GONE_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RUNNING: "set[subprocess.Popen[bytes]]" = set()
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(how: int = signal.SIGKILL) -> None:
    """In a child: the kernel sends it `how` if its parent ends, also in a way that runs no code of ours."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, how)


def tie_children() -> None:
    """From now on this process's forked children end with it, from their first moment on; theirs are left alone."""
    parent = os.getpid()

    def tie() -> None:
        if os.getppid() == parent:
            die_with_parent()

    os.register_at_fork(after_in_child=tie)


@contextlib.contextmanager
def needing(process: int, grace_s: float = 10) -> Iterator[None]:
    """Inside, this process ends with code 1 once `process` has been over for `grace_s`: what it owes never comes.

    vLLM raises where an engine ends during a step, but a function sent to it is then waited for without end.
    """
    over = threading.Event()
    state = Path(f"/proc/{process}/stat")

    def watch() -> None:
        while _group_of_running(state) is not None:
            if over.wait(1):
                return
        if not over.wait(grace_s):
            print(f"process {process} ended before its work was done", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="needing").start()
    try:
        yield
    finally:
        over.set()


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
            preexec_fn=die_with_parent,
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
            _wait_for_the_end(child.pid)
            _RUNNING.discard(child)


def _wait_for_the_end(group: int) -> None:
    """Until nothing of a killed process group runs: an engine takes a moment to give back a whole GPU's memory.

    Its processes are not our children. Every thread counts: memory goes back with the last one.
    """
    deadline = time.monotonic() + _GONE_S
    while _runs(group) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(group: int) -> bool:
    threads = Path("/proc").glob("[0-9]*/task/[0-9]*/stat")
    return any(_group_of_running(state) == group for state in threads)


def _group_of_running(stat: Path) -> int | None:
    """The process group of a process or thread, None if it is over."""
    try:
        # After the name, which may hold anything: state, parent, group.
        state, _, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(group)
