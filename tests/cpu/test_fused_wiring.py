# SPDX-License-Identifier: Apache-2.0
"""The fused path in a whole engine, its kernels replaced by fp32 counterparts: it computes what vLLM's layers do.

Which layer's norm, weights, state slots and gate go where is the product's own code. The control gives every KDA layer
the state slots of the first one, as if vLLM kept all layers' states in one group.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ling.decode.check import BOUND

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# BF16 rounding at other places, over twelve layers; a neighbour's state is 20 to 50 times this.
NEAR = 0.02
TAPS = ("0", "5", "11", "final", "logits")


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, one_thread: dict[str, str], at_once: int
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("wiring")
    env = os.environ | one_thread

    def run(how: str) -> Any:
        out = folder / f"{how}.pt"
        command = [sys.executable, str(Path(__file__).with_name("fused_on_cpu.py")), str(out), how]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(out)

    names = ("fused", "layers", "one group")
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def distances(ours: Any, theirs: Any) -> dict[tuple[str, str], float]:
    """Relative RMS distance by (workload, tap) over the answers' tokens."""
    found = {}
    for workload, lanes in ours["states"].items():
        for tap in TAPS:
            away = []
            for lane in lanes:
                # The first answer token comes of the prompt, through vLLM's layers in both.
                a, b = (run["states"][workload][lane][tap][-15:].float() for run in (ours, theirs))
                away.append(((a - b).norm(dim=-1) / b.norm(dim=-1)).square().mean())
            found[workload, tap] = float(torch.stack(away).mean().sqrt())
    return found


def test_the_fused_path_computes_what_the_layers_do(runs: dict[str, Any]) -> None:
    assert all(runs["fused"]["fused"].values()) and not any(runs["layers"]["fused"].values())
    assert all(runs["fused"]["tokens"].values())
    away = distances(runs["fused"], runs["layers"])
    assert {where: d for where, d in away.items() if not d < NEAR} == {}


def test_slots_of_another_group_are_noticed(runs: dict[str, Any]) -> None:
    away = distances(runs["one group"], runs["layers"])
    assert {where: d for where, d in away.items() if not d > 5 * NEAR} == {}


def test_the_check_at_load_finds_the_path_sound_and_puts_everything_back(runs: dict[str, Any]) -> None:
    found = runs["fused"]["checks"]
    assert len(found["sound"]) == 24 and max(found["sound"].values()) < 0.01
    assert set(found["put back"].values()) == {0.0}


def test_the_check_at_load_names_the_layer_that_is_wrong(runs: dict[str, Any]) -> None:
    assert len(runs["fused"]["planted"]) >= 8
    for name, place in runs["fused"]["planted"].items():
        found = runs["fused"]["checks"][name]
        assert [part for part, away in found.items() if not away <= BOUND] == [place], name


def test_only_the_inputs_show_a_wrong_query_where_a_token_sees_one_key(runs: dict[str, Any]) -> None:
    assert runs["fused"]["attended"] == 4, "all of them by our attention"
    assert "latent query" in runs["fused"]["planted"]
    found = runs["fused"]["checks"]["without inputs"]
    assert len(found) == 24 and all(away <= BOUND for away in found.values())


def test_the_check_at_load_finds_states_of_another_group(runs: dict[str, Any]) -> None:
    found = runs["one group"]["checks"]["sound"]
    wrong = [part for part, away in found.items() if not away <= BOUND]
    # Layers 0, 3, 6, 9 are the first group, 2, 5, 8, 11 are MLA.
    assert wrong == [f"layer {number} attention" for number in (1, 4, 7, 10)]
