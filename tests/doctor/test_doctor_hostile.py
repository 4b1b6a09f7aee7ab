# SPDX-License-Identifier: Apache-2.0
"""Input made to hurt: bounded memory and time, a clear finding, nothing executed, nothing echoed raw."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.doctor.evidence import GPU_LOG, STATIC, but
from tests.doctor.faults.common import huge_header
from vllm_ling.doctor.facts import log as log_facts
from vllm_ling.doctor.facts import server
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.server import ServerUnreadable, fetch, parse_samples, read_server
from vllm_ling.doctor.facts.settings import parse_flags
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.registry import run_checks
from vllm_ling.doctor.text import clean

Respond = Callable[[socket.socket], None]


def outcomes(facts: Facts) -> dict[str, str]:
    return {finding.check: finding.outcome for finding in run_checks(facts)[0]}


def read(path: Path) -> Facts:
    facts = Facts()
    read_log(facts, path)
    return facts


@contextmanager
def speaking(respond: Respond) -> Iterator[str]:
    """A TCP server that answers each connection with `respond`; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def one(connection: socket.socket) -> None:
            with connection:
                try:
                    connection.recv(65536)
                    respond(connection)
                except OSError:
                    pass  # the reader had enough

        def serve() -> None:
            listener.settimeout(0.1)
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        thread.join()


def test_two_gigabytes_of_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    start, end = GPU_LOG.rsplit("\n", 3)[0], "\n".join(GPU_LOG.splitlines()[-2:])
    path.write_text(start + "\n")
    with path.open("r+b") as file:  # a hole: two gigabytes that take no disk
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(f"\n{end}\n".encode())
    tracemalloc.start()
    started = time.monotonic()
    facts = read(path)
    took, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 10
    assert peak < 64 << 20
    assert facts["recent.accept_length"] == pytest.approx(2.68)
    assert facts["log.skipped_bytes"] > 1 << 30


def test_millions_of_ordinary_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    noise = (
        '(APIServer pid=1) INFO:     127.0.0.1:55908 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        * 400_000
    )
    path.write_text(GPU_LOG + noise)
    started = time.monotonic()
    assert outcomes(read(path))["plugin_active"] == "ok"
    assert time.monotonic() - started < 10


def test_one_endless_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.log"
    path.write_text("non-default args: {" + "'a': [" * 3_000_000 + "\n" + GPU_LOG)
    started = time.monotonic()
    assert outcomes(read(path))["plugin_active"] == "ok"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\x7fELF\0\0\0\n" * 5000, "binary"), (b"", "empty"), (bytes(range(256)) * 4096, "binary")],
)
def test_not_a_log(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(content)
    facts = read(path)
    found = outcomes(facts)
    assert problem in facts["problem.log"]
    assert set(found.values()) == {"unknown"}


def test_a_folder_or_nothing_as_a_log(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("/dev/zero")):
        assert "cannot be read" in read(path)["problem.log"]


def test_arguments_in_a_log_are_data(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = tmp_path / "server.log"
    path.write_text(
        f"INFO non-default args: {{'model': __import__('os').mkdir({str(mark)!r})}}\n"
        + GPU_LOG.split("\n", 1)[1]
    )
    facts = read(path)
    assert not mark.exists()
    assert "serve.enforce_eager" not in facts
    assert facts["serve.k"] == 3


def test_terminal_escapes_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    evil = "\x1b]0;owned\x07\x1b[2J\u202efaked\u009b31m"
    path.write_text(
        GPU_LOG.replace(
            "PROOF ok: draft_head: the draft's", f"FAULT draft_head_{evil}not_shared: {evil}"
        ).replace("PROOF ok: head_probe: top-1", f"FAULT head_probe: {evil} top-1")
    )
    for more in ((), ("--all",), ("--json",)):
        result = subprocess.run(
            [sys.executable, "-m", "vllm_ling.cli", "doctor", "--log", str(path), *more],
            capture_output=True,
            timeout=60,
        )
        shown = result.stdout.decode()
        assert result.returncode == 2
        assert "owned" in shown
        assert not set(shown) & set("\x1b\x07\x9b\u202e")


def test_a_log_of_an_unknown_version_gives_no_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(GPU_LOG.replace("(v0.33.0)", "(v9.9.9)"))
    assert set(outcomes(read(path)).values()) <= {"unknown", "ok"}
    assert outcomes(read(path))["plugin_active"] == "unknown"


def test_a_header_of_two_to_the_63(tmp_path: Path) -> None:
    tracemalloc.start()
    found = outcomes(but(STATIC, files=huge_header).facts(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert found["checkpoint_complete"] == "fail"
    assert found["exclusions_match"] == found["sources_readable"] == "unknown"


@pytest.mark.parametrize(
    "text", ["{", "[]", '"x"', "null", "[" * 100_000, "\xff\xfe", '{"architectures": 3}']
)
def test_damaged_config(text: str, tmp_path: Path) -> None:
    found = outcomes(but(STATIC, files=lambda f: (f / "config.json").write_text(text)).facts(tmp_path))
    assert found["checkpoint_complete"] in ("fail", "unknown")
    assert found["clamp_lists"] == "unknown"


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", "{bad"],
        ["--speculative-config", '{"num_speculative_tokens": "x"}'],
        ["--max-num-seqs"],
        ["--additional-config", "[1]"],
        ["--a.b", "1", "--a", "2", "--a.b.c", "3"],
        ["--", "-"],
        ["--gpu-memory-utilization", "?"],
    ],
)
def test_damaged_flags(words: list[str], tmp_path: Path) -> None:
    parse_flags(words)
    facts = but(STATIC, words=tuple(words)).facts(tmp_path)
    assert outcomes(facts)["checkpoint_complete"] == "ok"


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        connection.sendall(b"vllm:num_preemptions_total 1\n" * 4096)


def dripping(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def silent(connection: socket.socket) -> None:
    time.sleep(30)


def redirecting(connection: socket.socket) -> None:
    connection.sendall(
        b"HTTP/1.1 302 Found\r\nLocation: http://example.invalid/\x1b[2J\r\nContent-Length: 0\r\n\r\n"
    )


def garbage(connection: socket.socket) -> None:
    connection.sendall(os.urandom(4096))


def bomb(connection: socket.socket) -> None:
    import gzip

    body = gzip.compress(b"vllm:num_preemptions_total 1\n" * 1_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


@pytest.mark.parametrize(
    "respond", [endless, dripping, silent, redirecting, garbage, bomb], ids=lambda f: f.__name__
)
def test_a_hostile_server(respond: Respond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEADLINE_S", 0.5)
    monkeypatch.setattr(fetch, "__defaults__", (server.MAX_BYTES, 0.5))
    facts = Facts()
    tracemalloc.start()
    started = time.monotonic()
    with speaking(respond) as url:
        read_server(facts, url, 0.1)
    took, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 5
    assert peak < 64 << 20
    assert facts["problem.metrics"].isprintable()
    found = outcomes(facts)
    assert found["sources_readable"] == "unknown"
    assert "fail" not in found.values()


def test_a_redirect_is_not_followed() -> None:
    visited = threading.Event()
    with speaking(lambda connection: visited.set()) as elsewhere:

        def redirect(connection: socket.socket) -> None:
            connection.sendall(
                f"HTTP/1.1 307 Go\r\nLocation: {elsewhere}/\r\nContent-Length: 0\r\n\r\n".encode()
            )

        with speaking(redirect) as url, pytest.raises(ServerUnreadable, match="redirects"):
            fetch(f"{url}/metrics")
    assert not visited.is_set()


@pytest.mark.parametrize(
    "page",
    ["", "<html>", "vllm:num_preemptions_total{ 1", "vllm:num_preemptions_total notanumber", "a" * 1000],
)
def test_a_page_that_is_no_metrics(page: str) -> None:
    with pytest.raises(ServerUnreadable):
        parse_samples(page)


def test_shown_text_is_one_bounded_line() -> None:
    assert clean("a\n\x1b[31mb\t" + "c" * 10_000).startswith("a ?[31mb c")
    assert len(clean("c" * 10_000)) == 300
    assert json.loads(json.dumps(clean("\ud800"))) == "?"
    assert log_facts.HEAD + log_facts.TAIL <= 64 << 20
