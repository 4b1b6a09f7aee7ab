# SPDX-License-Identifier: Apache-2.0
"""Starts a server in a process group of its own, waits until it answers, and leaves nothing of it behind."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from vllm_ling.bench.processes import die_with_parent
from vllm_ling.errors import LingError
from vllm_ling.eval.interrupt import held

HOST = "127.0.0.1"
TAIL_LINES = 30
_FAULT = re.compile(r"vllm-ling: FAULT (\w+): (.*)")
_CAUSE = re.compile(r"(?:LingError|vllm-ling: error): (.*)")
_STOP_S = 20.0
_ORPHANS_S = 2.0


class ServerError(LingError):
    """A server that did not start or died; `tail` holds the end of its log."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class Server:
    """A server that answers at `url`; everything it and its children print goes to `log`."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    ready_s: float

    def check(self) -> None:
        """Raises ServerError if the server has died."""
        if (code := self.process.poll()) is not None:
            why = find_cause(self.log.read_text(encoding="utf-8", errors="replace"))
            raise ServerError(f"the server died with exit code {code}{why} (log: {self.log})", tail(self.log))

    def faults(self) -> dict[str, str]:
        """What vllm-ling's proofs found broken, by code, read from the log."""
        return find_faults(self.log.read_text(encoding="utf-8", errors="replace"))


def find_faults(log: str) -> dict[str, str]:
    """Code and message of every `vllm-ling: FAULT code: message` line; several processes may report the same one."""
    return {code: message.strip() for code, message in _FAULT.findall(log)}


def find_cause(log: str) -> str:
    """`: message` of the first LingError in a log, whose end is mostly other processes' tracebacks, or nothing."""
    match = _CAUSE.search(log)
    return f": {match[1].strip()}" if match else ""


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """A TCP port on the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str],
    *,
    port: int,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> Iterator[Server]:
    """Runs `command`, which must serve HTTP on `port` of the loopback address, for the length of a `with` block.

    On Linux the server gets SIGTERM when the thread that called this ends, however it ends.

    Args:
        env: variables on top of this process's own.
        timeout_s: how long the server may take until GET /health answers 200.

    Raises:
        LingError: if something already listens on the port.
        ServerError: if the server exits or does not answer in time.
    """
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise LingError(f"port {port} on {HOST} is already in use")
    with started(command, log, env) as process:
        yield _wait_ready(process, port, log, timeout_s)


@contextmanager
def started(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `command` in a process group of its own for the length of the block, with its output in `log`.

    It gets SIGTERM when this process dies, however it dies: what is left behind would hold the memory. `env` is added
    to this process's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = None
    try:
        with log.open("wb") as sink, held():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        yield process
    finally:
        if process is not None:
            stop_group(process)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float) -> Server:
    url, started = f"http://{HOST}:{port}", time.monotonic()
    while True:
        waited = time.monotonic() - started
        server = Server(url, log, process, waited)
        server.check()
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return server
        except httpx.TransportError:
            pass
        if waited > timeout_s:
            raise ServerError(f"the server did not answer within {timeout_s:.0f} s (log: {log})", tail(log))
        time.sleep(0.2)


def stop_group(process: subprocess.Popen[bytes], patience_s: float = _STOP_S) -> None:
    """Ends a process that leads its group, and the group: SIGTERM, a wait, then SIGKILL for what is left.

    A second Ctrl-C during the wait goes straight to SIGKILL.
    """
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(patience_s)
            _wait_group_gone(process.pid, _ORPHANS_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        _wait_group_gone(process.pid, _ORPHANS_S)


def _signal_group(group: int, number: int) -> bool:
    """Whether the group still has a member to signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _wait_group_gone(group: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
