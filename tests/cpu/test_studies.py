# SPDX-License-Identifier: Apache-2.0
"""The studies of full-size engines, run whole on the small model: a sound engine passes, a small fault is found."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vllm_ling.eval.studies import full_size
from vllm_ling.eval.studies.full_size_side import SideSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SPEC = SideSpec({}, "mini", 12, (5, 11))
# One layer's feed-forward branch 10% too large where few tokens are decoded: a few percent of the residual stream.
FAULT = """
import sys, torch
from vllm_ling.eval.studies import full_size_side as side
sound = side.Recorder.__init__
def broken(self, model, layers):
    sound(self, model, layers)
    model.model.layers[4].mlp.register_forward_hook(lambda m, i, out: out * 1.1 if len(out) <= 8 else None)
side.Recorder.__init__ = broken
torch.save(side.run_side(side.SideSpec({}, "mini", 12, (5, 11))), sys.argv[1])
"""


@dataclass(frozen=True)
class Study:
    """What one study's process left: its exit and the file it wrote."""

    done: "subprocess.CompletedProcess[str]"
    out: Path


def run(env: dict[str, str], out: Path, *command: str) -> Study:
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    return Study(done, out)


@pytest.fixture(scope="module")
def studies(
    tmp_path_factory: pytest.TempPathFactory, one_thread: dict[str, str], at_once: int
) -> dict[str, Study]:
    """All of them, as many at a time as there are cores for."""
    folder = tmp_path_factory.mktemp("studies")
    common = ("--model", "mini", "--options", "{}")
    full, long, side = folder / "full.json", folder / "long.json", folder / "side.pt"
    commands = {
        "full": (
            full,
            "-m",
            "vllm_ling.eval.studies.full_size",
            *common,
            "--without-stock",
            "--out",
            str(full),
        ),
        "fault": (side, "-c", FAULT, str(side)),
        "long": (
            *(long, "-m", "vllm_ling.eval.studies.long_run", *common, "--layers", "6", "--eager"),
            *("--draft", "3", "--budget", "40", "--out", str(long)),
        ),
    }
    with ThreadPoolExecutor(at_once) as pool:
        found = {
            name: pool.submit(run, os.environ | one_thread, *command) for name, command in commands.items()
        }
    return {name: study.result() for name, study in found.items()}


def test_full_size_passes_a_sound_engine(studies: dict[str, Study]) -> None:
    study = studies["full"]
    assert study.done.returncode == 0, study.done.stdout[-3000:]
    result = json.loads(study.out.read_text())
    assert result["provenance"]["packages"] and not result["wrong"]
    assert {"decode 4", "verify 4", "prefill", "slots mixed"} <= {row["workload"] for row in result["rows"]}
    assert all(slot["same_bits"] == 1 for slot in result["slots"].values())
    drafted = result["engines"]["drafted"]
    assert 0.5 < drafted["accepted"] / drafted["drafts"] < 2.5


def test_full_size_finds_a_small_fault(studies: dict[str, Study]) -> None:
    study = studies["fault"]
    assert study.done.returncode == 0, study.done.stderr[-3000:]
    exact, stale = full_size.reference(SPEC, lambda _: None)
    found = full_size.judge(SPEC, {"ours": torch.load(study.out)}, exact, stale, 512)
    assert any(line.startswith("from one token, 5") for line in found["wrong"])


def test_long_run_ends_with_its_budget(studies: dict[str, Study]) -> None:
    study = studies["long"]
    assert study.done.returncode == 0, study.done.stdout[-3000:]
    result = json.loads(study.out.read_text())
    assert not result["target_reached"] and 500 < result["counts"]["tokens"] < 200_000
    verdicts = {check["name"]: check["passed"] for check in result["checks"]}
    assert (
        verdicts["every token right"] and verdicts["probe unchanged"] and verdicts["log-probabilities finite"]
    )
