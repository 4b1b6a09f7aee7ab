# SPDX-License-Identifier: Apache-2.0
"""Doctor beside a real server: a sound one has no findings, and dashboard and alerts name series that it exports."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from vllm_ling.doctor.facts.pages import fetch
from vllm_ling.eval.serving.servers import Server, free_port, running
from vllm_ling.metrics import names
from vllm_ling.tiny.problems import HELDOUT_PATH

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
QUESTIONS = [json.loads(line)["question"] for line in HELDOUT_PATH.read_text().splitlines()]
SERVE = [
    sys.executable,
    "-m",
    "vllm_ling.cli",
    "serve",
    "tiny-ling",
    "--host",
    "127.0.0.1",
    "--enforce-eager",
]
SERVE += ["--max-num-seqs", "4", "--max-model-len", "256"]
SERVE += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
INTERVAL_S = 4.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """tiny-ling with MTP, answering questions one after another."""
    port = free_port()
    log = tmp_path_factory.mktemp("doctor") / "log"
    with running([*SERVE, "--port", str(port)], port=port, log=log, timeout_s=400) as server:
        stop = threading.Event()

        def ask() -> None:
            with httpx.Client(trust_env=False, timeout=120) as client:
                for question in QUESTIONS * 10:
                    if stop.is_set():
                        return
                    body = {"model": "tiny-ling", "messages": [{"role": "user", "content": question}]}
                    client.post(
                        f"{server.url}/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 64}
                    )

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        yield server
        stop.set()
        thread.join()


FAULTY = [*SERVE, "--additional-config", '{"ling": {"inject_fault": "head_bytes", "on_fault": "warn"}}']


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with a broken draft head, a misspelt variable, and a benchmark of random tokens that may not end."""
    port = free_port()
    log = tmp_path_factory.mktemp("faulty") / "log"
    env = {"VLLM_USE_DEEPGEMM": "0"}
    with running([*FAULTY, "--port", str(port)], port=port, log=log, env=env, timeout_s=400) as server:
        stop = threading.Event()

        def ask(seed: int) -> None:
            with httpx.Client(trust_env=False, timeout=120) as client:
                while not stop.is_set():
                    tokens = [(7919 * seed * (place + 3)) % 250 + 4 for place in range(16)]
                    body = {"model": "tiny-ling", "prompt": tokens, "max_tokens": 8, "ignore_eos": True}
                    client.post(f"{server.url}/v1/completions", json=body)

        threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        yield server
        stop.set()
        for thread in threads:
            thread.join()


def doctor(*words: str) -> tuple[int, dict[str, object], float]:
    """Exit code, JSON and seconds of a run."""
    started = time.monotonic()
    command = [sys.executable, "-m", "vllm_ling.cli", "doctor", "--json", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.returncode, json.loads(result.stdout), time.monotonic() - started


@pytest.mark.clean
def test_a_sound_server_under_load_has_no_findings(server: Server) -> None:
    code, answer, took = doctor("--url", server.url, "--interval", str(INTERVAL_S))
    findings = answer["findings"]
    assert isinstance(findings, list)
    complaints = [finding for finding in findings if finding["outcome"] != "ok"]
    assert (complaints, code) == ([], 0)
    assert {finding["check"] for finding in findings} >= {
        "accept_length",
        "draft_head",
        "head_format",
        "plugin_active",
    }
    assert took < INTERVAL_S + 3


@pytest.mark.clean
def test_its_log_has_no_findings(server: Server) -> None:
    page = fetch(f"{server.url}/metrics")
    deadline = time.monotonic() + 15
    while "SpecDecoding metrics" not in server.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    code, answer, _ = doctor("--log", str(server.log))
    findings = answer["findings"]
    assert isinstance(findings, list)
    assert [finding for finding in findings if finding["outcome"] != "ok"] == []
    assert code == 0
    # The record of another process than the API server's is on the page.
    assert re.search(rf'^{names.CHOICE}{{.*process="(?!APIServer)', page, re.MULTILINE)


def test_dashboard_and_alerts_name_real_series(server: Server) -> None:
    page = fetch(f"{server.url}/metrics")
    exported = set(re.findall(r"^([a-z_]+:[a-z0-9_]+)", page, re.MULTILINE))
    folder = files("vllm_ling.metrics")
    board = json.loads((folder / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 14
    used = set(re.findall(r"\b(?:vllm|ling):\w+", "\n".join(queries) + (folder / "alerts.yaml").read_text()))
    # A family without a fault has no sample; its TYPE line shows that it exists.
    exported |= set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    assert used - exported == set()
    assert set(names.ALL) - exported == set()


@pytest.mark.fault
def test_the_faults_of_a_running_server_are_found(faulty: Server) -> None:
    deadline = time.monotonic() + 60
    while "ALARM draft_chance" not in faulty.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    code, answer, _ = doctor("--url", faulty.url, "--interval", str(INTERVAL_S))
    found = {finding["check"]: finding for finding in answer["findings"] if finding["outcome"] != "ok"}  # type: ignore[attr-defined]
    assert code == 2
    # With two requests at the moment of a reading, such drafts lose there too.
    assert set(found) - {"concurrency"} == {
        "faults_allowed",
        "draft_head",
        "accept_length",
        "draft_positions",
        "draft_alarms",
        "speculation_pays",
        "random_tokens",
    }
    assert "draft_head_not_shared" in found["draft_head"]["evidence"]
    assert "ignore_eos" in found["random_tokens"]["evidence"]
    assert "draft_chance" in found["draft_alarms"]["evidence"]
    assert all(finding["fix"] for finding in found.values())


@pytest.mark.fault
def test_the_same_faults_are_found_in_its_log(faulty: Server) -> None:
    deadline = time.monotonic() + 15
    while "SpecDecoding metrics" not in faulty.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    code, answer, _ = doctor("--log", str(faulty.log))
    found = {finding["check"]: finding for finding in answer["findings"] if finding["outcome"] != "ok"}  # type: ignore[attr-defined]
    assert code == 2
    assert {"faults_allowed", "draft_head", "accept_length", "unknown_variables", "draft_alarms"} <= set(
        found
    )
    assert found["unknown_variables"]["fix"] == "did you mean VLLM_USE_DEEP_GEMM?"
