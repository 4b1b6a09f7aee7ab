# SPDX-License-Identifier: Apache-2.0
"""Servers are started and stopped with everything they started; failures show the end of the log."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process_state import over
from vllm_ling.errors import LingError
from vllm_ling.eval.serving.servers import (
    ServerError,
    find_cause,
    find_faults,
    free_port,
    running,
    stop_group,
)

# Answers every GET, after starting a child that outlives its parent and shrugs off SIGTERM.
STUBBORN = """
import http.server, signal, subprocess, sys
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
child = ignore + "print('child up', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child])
print("child", process.pid, flush=True)
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
OK_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print("option", os.environ.get("OPTION"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_server_runs_for_the_block_with_its_environment(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "logs" / "server.log"
    command = [sys.executable, "-c", OK_SERVER, str(port)]
    with running(command, port=port, log=log, env={"OPTION": "x"}, timeout_s=30) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        server.check()
        assert not over(server.process.pid)
    assert over(server.process.pid)
    assert "option x" in log.read_text()


def test_a_server_is_stopped_when_the_block_fails(tmp_path: Path) -> None:
    port = free_port()
    with (
        pytest.raises(KeyboardInterrupt),
        running([sys.executable, "-c", OK_SERVER, str(port)], port=port, log=tmp_path / "log") as server,
    ):
        raise KeyboardInterrupt
    assert over(server.process.pid)


def test_a_signal_in_the_middle_of_the_start_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = subprocess.Popen

    def interrupted(*args: Any, **how: Any) -> "subprocess.Popen[bytes]":
        process = start(*args, **how)
        started.append(process.pid)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    port = free_port()
    with (
        pytest.raises(KeyboardInterrupt),
        running([sys.executable, "-c", OK_SERVER, str(port)], port=port, log=tmp_path / "log"),
    ):
        pytest.fail("the block must not run")
    assert started and over(started[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("stubborn_leader", [False, True])
def test_stopping_a_group_ends_children_that_ignore_sigterm(tmp_path: Path, stubborn_leader: bool) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", STUBBORN, str(free_port()), *(["stubborn"] if stubborn_leader else [])]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    deadline = time.monotonic() + 30
    while "child up" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(log.read_text().split()[1])
    assert not over(child)
    stop_group(process, patience_s=0.5)
    assert over(process.pid) and over(child)


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys\nfor n in range(100): print('line', n)\nsys.exit(3)"
    with (
        pytest.raises(ServerError, match="exit code 3") as failed,
        running([sys.executable, "-c", code], port=free_port(), log=tmp_path / "log"),
    ):
        pytest.fail("the block must not run")
    lines = failed.value.tail.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (30, "line 70", "line 99")
    assert isinstance(failed.value, LingError)


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError, match="did not answer within 1 s"),
        running([sys.executable, "-c", code], port=free_port(), log=log, timeout_s=1),
    ):
        pytest.fail("the block must not run")
    assert over(int(log.read_text()))


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(LingError, match=f"port {port} on 127.0.0.1 is already in use"),
            running(["false"], port=port, log=tmp_path / "log"),
        ):
            pytest.fail("the block must not run")
    assert os.listdir(tmp_path) == []


def test_faults_are_read_from_a_server_log() -> None:
    log = """\
(EngineCore pid=7) ERROR 12-01 05:09:13 [status.py:60] vllm-ling: FAULT draft_head: reads FP8 as BF16
(EngineCore pid=8) ERROR 12-01 05:09:13 [status.py:60] vllm-ling: FAULT draft_head: reads FP8 as BF16
(EngineCore pid=8) ERROR 12-01 05:09:13 [status.py:60] vllm-ling: FAULT head_probe: top-1 agreement 12.5%
(EngineCore pid=8) INFO 12-01 05:09:13 [status.py:60] vllm-ling: PROOF ok: router: fine
"""
    assert find_faults(log) == {"draft_head": "reads FP8 as BF16", "head_probe": "top-1 agreement 12.5%"}
    assert find_faults("INFO nothing to see") == {}


def test_the_cause_of_death_is_found_above_later_tracebacks() -> None:
    log = """\
(Worker pid=7) ERROR 12-01 05:09:13 [x.py:9] vllm_ling.errors.LingError: lm_head.weight: stored as F8_E4M3
(EngineCore pid=6) ERROR 12-01 05:09:14 [core.py:1] RuntimeError: Engine core initialization failed
"""
    assert find_cause(log) == ": lm_head.weight: stored as F8_E4M3"
    assert find_cause("vllm-ling: error: unknown option ling.x\n") == ": unknown option ling.x"
    assert find_cause("RuntimeError: other") == ""
