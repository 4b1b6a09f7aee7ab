# SPDX-License-Identifier: Apache-2.0
"""Servers made to hurt: bounded memory and time, a clear finding, and little asked of a sound one."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.doctor.evidence import FOLDER, Live
from vllm_ling.doctor.facts import pages
from vllm_ling.doctor.facts.pages import ServerUnreadable, fetch
from vllm_ling.doctor.facts.server import parse_samples, put_samples, read_server
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.registry import run_checks

Respond = Callable[[socket.socket], None]


def outcomes(facts: Facts) -> dict[str, str]:
    return {finding.check: finding.outcome for finding in run_checks(facts)[0]}


@contextmanager
def answering(respond: Callable[[socket.socket, str], None]) -> Iterator[str]:
    """A TCP server that answers each connection with `respond` to what was asked; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):  # the reader had enough
                respond(connection, connection.recv(65536).decode())

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


def speaking(respond: Respond) -> AbstractContextManager[str]:
    """The same for an answer that does not depend on the question."""
    return answering(lambda connection, _: respond(connection))


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


def dripping_header(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def garbage(connection: socket.socket) -> None:
    connection.sendall(os.urandom(4096))


def bomb(connection: socket.socket) -> None:
    import gzip

    body = gzip.compress(b"vllm:num_preemptions_total 1\n" * 1_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


@pytest.mark.parametrize(
    "respond",
    [endless, dripping, dripping_header, silent, redirecting, garbage, bomb],
    ids=lambda f: f.__name__,
)
def test_a_hostile_server(respond: Respond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DEADLINE_S", 0.5)
    facts = Facts()
    tracemalloc.start()
    started = time.monotonic()
    with speaking(respond) as url:
        read_server(facts, url, 0.1)
    took, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 2
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


@pytest.mark.parametrize(
    ("said", "damaged"),
    [
        ('position="0"', 'position="00"'),
        ('position="0"', 'position="\u00b2"'),
        ('position="2"', 'position="1000000"'),
        ("accepted_tokens_total 100336.0", "accepted_tokens_total NaN"),
        ("accepted_tokens_total 100336.0", "accepted_tokens_total 1e300"),
        ("accepted_tokens_total 100336.0", "accepted_tokens_total 5"),
        ('kv_cache_max_concurrency="40.0"', 'kv_cache_max_concurrency="nan"'),
        ('what="', 'renamed="'),
    ],
)
def test_damaged_series_give_no_verdict(said: str, damaged: str, tmp_path: Path) -> None:
    before, after = Live().pages(tmp_path)
    assert said in after
    facts = Facts()
    facts.sources.add("live")
    put_samples(facts, parse_samples(before), parse_samples(after.replace(said, damaged)), "test")
    found = outcomes(facts)
    assert not {"fail", "warn"} & set(found.values())
    checks = {
        "accept": "accept_length",
        "positi": "accept_length",
        "kv_cac": "cache_size",
        "what=": "model_class",
    }
    assert found[checks[said[:6].strip('"')]] == "unknown"


def test_a_sound_server_is_asked_three_times_and_is_known_to_be_local(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "DEADLINE_S", 30.0)  # the machine may be busy
    requests: list[str] = []
    before, after = ((FOLDER / f"cpu-mtp.{when}").read_text() for when in ("before", "after"))
    answers = {"/version": ['{"version": "0.32.0"}'], "/metrics": [before, after]}

    def respond(connection: socket.socket, request: str) -> None:
        requests.append(request)
        body = answers[request.split()[1]].pop(0).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    facts = Facts()
    with answering(respond) as url:
        started = time.monotonic()
        read_server(facts, f"{url}/v1/", 0.5)
        took = time.monotonic() - started
    assert [request.split()[:2] for request in requests] == [
        ["GET", "/metrics"],
        ["GET", "/version"],
        ["GET", "/metrics"],
    ]
    assert took >= 0.5
    assert facts["server.local"] is True
    assert facts["recent.accept_length"] > 3


@pytest.mark.parametrize("name", ["cpu-mtp", "cpu-ranks-mtp"])
def test_a_live_run_needs_three_seconds_beside_the_interval(name: str) -> None:
    before, after = ((FOLDER / f"{name}.{when}").read_text() for when in ("before", "after"))
    answers = {"/version": ['{"version": "0.32.0"}'], "/metrics": [before, after]}

    def respond(connection: socket.socket, request: str) -> None:
        body = answers[request.split()[1]].pop(0).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    command = [sys.executable, "-m", "vllm_ling.cli", "doctor", "--json", "--interval", "0.5", "--url"]
    with answering(respond) as url:
        started, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([*command, url], capture_output=True, text=True, timeout=60)
        took, after_run = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {finding["check"]: finding["outcome"] for finding in json.loads(result.stdout)["findings"]}
    assert (found["plugin_active"], found["ranks_agree"], found["accept_length"]) == ("ok", "ok", "ok")
    # Other processes may share the core: the interval, and its own processor time, which it spends on no server.
    own = after_run.ru_utime + after_run.ru_stime - used.ru_utime - used.ru_stime
    assert min(took, 0.5 + own) < 3.5


@pytest.mark.parametrize("respond", [silent, dripping_header, endless], ids=lambda f: f.__name__)
def test_the_command_needs_three_seconds_beside_the_interval_at_most(respond: Respond) -> None:
    command = [sys.executable, "-m", "vllm_ling.cli", "doctor", "--interval", "0.1", "--url"]
    with speaking(respond) as url:
        started, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([*command, url], capture_output=True, text=True, timeout=60)
        took, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 3
    assert "UNKNOWN sources_readable" in result.stdout and "fix: name the address" in result.stdout
    # Other processes may share the core: what it waits for at most, and its own processor time.
    own = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    assert min(took, 0.1 + pages.DEADLINE_S + own) < 3.1
