# SPDX-License-Identifier: Apache-2.0
"""Captures evidence/cpu-*.{log,before,after} from real servers: `python -m tests.doctor.capture [NAME ...]`."""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import httpx

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.doctor.facts.pages import fetch
from vllm_ling.doctor.phrases import PHRASES
from vllm_ling.eval.serving.servers import Server, free_port, running
from vllm_ling.tiny.problems import HELDOUT_PATH

FOLDER = Path(__file__).parent / "evidence"
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
TRAP = ["--additional-config", '{"ling": {"inject_fault": "head_bytes", "on_fault": "warn"}}']
# Name: the flags, and whether the requests are random tokens that may not end.
SERVERS: dict[str, tuple[list[str], bool]] = {
    "mtp": (MTP, False),
    "plain": ([], False),
    "trap": ([*MTP, *TRAP], False),
    "random": (MTP, True),
}


def capture(name: str) -> None:
    """Runs one server under load and keeps what it said."""
    flags, random = SERVERS[name]
    port = free_port()
    command = [sys.executable, "-m", "vllm_ling.cli", "serve", "tiny-ling", "--host", "127.0.0.1"]
    command += [
        "--port",
        str(port),
        "--enforce-eager",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "256",
        *flags,
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(command, port=port, log=log, timeout_s=400) as server:
            _load(server, random, 3)
            before = fetch(f"{server.url}/metrics")
            _load(server, random, 12)
            time.sleep(11)  # vLLM logs its statistics every ten seconds
            _load(server, random, 1)
            after = fetch(f"{server.url}/metrics")
            said = log.read_text(errors="replace")
    (FOLDER / f"cpu-{name}.log").write_text(_kept_lines(said))
    (FOLDER / f"cpu-{name}.before").write_text(_kept_series(before))
    (FOLDER / f"cpu-{name}.after").write_text(_kept_series(after))


def _load(server: Server, random: bool, count: int) -> None:
    questions = [json.loads(line)["question"] for line in HELDOUT_PATH.read_text().splitlines()]
    with httpx.Client(trust_env=False, timeout=120) as client:
        for number in range(count):
            if random:
                tokens = [(7919 * (number + 1) * (place + 3)) % 250 + 4 for place in range(32)]
                body = {"model": "tiny-ling", "prompt": tokens, "max_tokens": 48, "ignore_eos": True}
                answer = client.post(f"{server.url}/v1/completions", json={**body, "temperature": 1.5})
            else:
                message = {"role": "user", "content": questions[number]}
                body = {"model": "tiny-ling", "messages": [message], "temperature": 0, "max_tokens": 64}
                answer = client.post(f"{server.url}/v1/chat/completions", json=body)
            answer.raise_for_status()


def _kept_lines(text: str) -> str:
    """Lines that carry facts or warn, without this machine's paths."""
    kept = [
        line
        for line in text.splitlines()
        if "WARNING" in line or "ERROR" in line or any(p.marker in line for p in PHRASES.values())
    ]
    return _public("\n".join(kept) + "\n")


def _kept_series(page: str) -> str:
    """Samples without histograms and without the process's own series."""
    kept = [
        line
        for line in page.splitlines()
        if re.match(r"(vllm|ling):", line) and not re.match(r"\S*_(bucket|sum|count|created)\b", line)
    ]
    return _public("\n".join(kept) + "\n")


def _public(text: str) -> str:
    text = text.replace(str(tiny_ling_path()), "/models/tiny-ling")
    return re.sub(r"/(?:[\w.-]+/)*(?:site-packages|vllm_ling)/", "", text)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SERVERS:
        capture(chosen)
