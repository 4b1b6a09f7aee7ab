# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling verify tiny-ling` with real engines and a real server: ok, but for the GPU's part, which is unknown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ling.eval.provenance import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
COMMAND = [sys.executable, "-m", "vllm_ling.cli", "verify", "tiny-ling"]
SMALL = ["--layers", "2", "--prompts", "4", "--tokens", "24", "--items", "4", "--minutes", "0"]
SERVE = ["--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "512"]
SERVE += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']


def test_the_whole_verification(tmp_path: Path, one_thread: dict[str, str]) -> None:
    env = {**os.environ, **one_thread, "PYTHONPATH": str(ROOT)}
    command = [*COMMAND, "--out", str(tmp_path / "v.json"), *SMALL, "--", *SERVE]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    content = json.loads((tmp_path / "v.json").read_text())
    found = {finding["part"]: finding for finding in content["findings"]}
    outcomes = {part: finding["outcome"] for part, finding in found.items()}
    sound = dict.fromkeys(("head", "logits", "greedy", "gsm8k", "speed"), "ok")
    assert outcomes == {**sound, "kernels": "unknown"}, content["findings"]
    assert "no NVIDIA GPU here" in found["kernels"]["evidence"]
    assert found["logits"]["figures"]["rms"] < 2e-5
    assert found["greedy"]["figures"]["identical"] == 4 and found["greedy"]["figures"]["accept_length"] > 2
    assert found["gsm8k"]["figures"]["right"] == 4
    assert found["speed"]["figures"]["accept_length"] > 2
    for written in tmp_path.glob("v.*"):
        assert str(tmp_path) not in written.read_text() and str(ROOT) not in written.read_text()
    page = (tmp_path / "v.md").read_text()
    assert page in done.stdout and page.startswith("# Verification of tiny-ling: unknown")
    finished = [*COMMAND, "--parts", ",".join(sound), *command[len(COMMAND) :]]
    again = subprocess.run(finished, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 3 and again.stdout.count(": finished on ") == 5, again.stdout + again.stderr
