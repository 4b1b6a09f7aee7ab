# SPDX-License-Identifier: Apache-2.0
"""`eval ablate --random-weights` with the real vLLM: servers of a model that has no files, and their page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ling.eval.provenance import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_two_stages_without_a_checkpoint(tmp_path: Path) -> None:
    out, loads = tmp_path / "out", ["text 48/24", "random tokens 48/24"]
    words = ["eval", "ablate", "--random-weights", "mini", "--stages", "moe,mtp", "--out", str(out)]
    words += ["--text", str(ROOT / "README.md"), "--random-tokens", "--isl", "48", "--osl", "24"]
    words += ["--requests", "1", "--repeats", "3", "--", "--enforce-eager", "--gpu-memory-utilization", "0.3"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vllm_ling.cli", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((out / "ablation.json").read_text())
    assert found["random_weights"] == "mini-random-weights" and found["failures"] == {}
    moe, mtp = found["stages"]
    for stage in (moe, mtp):
        assert [load["load"] for load in stage["loads"]] == loads and stage["failed"] == 0
        assert all(load["tok_per_s"] > 0 for load in stage["loads"])
        assert stage["server"]["choices"]["moe mxfp4"] == "torch"
    assert moe["loads"][0]["accept_length"] is None and "draft_head" in mtp["server"]["proofs"]
    # Verified, as a CPU draws no lots: what random weights draft is hardly ever accepted.
    assert mtp["set_accept_length"] is None and 1.0 <= mtp["loads"][0]["accept_length"] < 1.6
    assert "moe: vLLM" in (out / "ablation.md").read_text() and (out / "ablation.svg").exists()
