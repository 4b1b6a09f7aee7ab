# SPDX-License-Identifier: Apache-2.0
"""The full-size comparison without an engine: bars that can fail, the verdict, and the process of a side."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vllm_ling.errors import LingError
from vllm_ling.eval.studies import full_size, full_size_bars
from vllm_ling.eval.studies.child import run_child
from vllm_ling.eval.studies.full_size_bars import (
    ASSUMED,
    Away,
    Comparison,
    States,
    compare,
    identical,
    repeats,
)
from vllm_ling.eval.studies.full_size_side import SideSpec, as_spec
from vllm_ling.eval.studies.workloads import (
    ANSWER,
    DRAFTED,
    LENGTHS,
    PLAIN,
    STOCK,
    Workload,
)

SPAN = {0: range(2, 6)}


def states(noise: float, seed: int, logits: bool = False) -> States:
    exact = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    value = exact + noise * torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    kept = {"positions": torch.arange(8), "5": value, "logits positions": torch.arange(8), "logits": value}
    return {0: kept}


def row(ours: float, stock: float | None, stale: float | None = 0.5, tap: str = "5") -> Comparison:
    other = None if stock is None else states(stock, 2)
    control = None if stale is None else states(stale, 3)
    made = compare("decode 1", tap, SPAN, states(ours, 1), other, states(0, 0), control)
    assert made is not None
    return made


def test_distances_are_what_was_put_in() -> None:
    made = row(0.03, 0.04)
    assert made.tokens == 4 and made.stock is not None and made.apart is not None
    assert made.ours.rms == pytest.approx(0.03, rel=0.2) and made.stock.rms == pytest.approx(0.04, rel=0.2)
    assert made.apart == pytest.approx(0.05, rel=0.2)


def test_as_good_as_stock_passes_and_worse_fails() -> None:
    assert row(0.04, 0.04).wrong() == [] and row(0.02, 0.04).wrong() == []
    assert len(row(0.08, 0.04).wrong()) == 2  # the mean and the median
    assert "nan" in row(float("nan"), 0.04).wrong()[0]
    assert row(ASSUMED, None).wrong() == [] and row(2 * ASSUMED, None).wrong()


def test_one_flipped_token_does_not_move_the_median() -> None:
    made = row(0.02, 0.04)
    assert (
        Comparison("w", "5", 4, Away(0.2, 0.02), made.stock, None, None).wrong()[0].startswith("w, 5: 0.200")
    )


def test_the_head_may_cost_what_fp8_costs() -> None:
    assert row(0.04, 0.03, tap="logits").wrong() == []
    assert row(0.055, 0.03).wrong() and row(0.08, 0.03, tap="logits").wrong()


def test_what_never_saw_stocks_prefill_has_a_bar_of_its_own() -> None:
    assert full_size_bars.depth_of("5", 12) == 6 and full_size_bars.depth_of("final", 12) == 12
    made = compare("w", "5", SPAN, states(0.02, 1), states(0.04, 2), states(0, 0), None, 6, own=True)
    assert made is not None and len(made.wrong()) == 2
    made = compare("w", "5", SPAN, states(0.01, 1), None, states(0, 0), None, 6, own=True)
    assert made is not None and made.wrong() == []


def test_a_blind_bar_and_a_broken_stock_are_reported() -> None:
    assert "blind" in row(0.04, 0.04, stale=0.06).wrong()[0]
    assert "no measure" in row(0.1, 0.5, stale=None).wrong()[0]


def test_tokens_that_were_never_seen_are_reported() -> None:
    assert full_size_bars.missing("w", {0: range(2, 9)}, states(0, 0)) == []
    assert "2 tokens of lane 0" in full_size_bars.missing("w", {0: range(2, 11)}, states(0, 0))[0]


def test_agreement_leaves_the_known_token_out() -> None:
    exact, ours = states(0, 0), states(0, 0)
    ours[0]["logits"] = exact[0]["logits"].clone()
    known = {0: exact[0]["logits"].argmax(-1).roll(1).tolist()}
    ours[0]["logits"][torch.arange(7), torch.tensor(known[0][1:])] += 5  # only the known token moves
    assert full_size_bars.agreement(ours, exact, SPAN, known) == 1
    assert full_size_bars.agreement(states(2.0, 1), exact, SPAN, known) < 0.8


def test_reused_slots_must_repeat_the_bits() -> None:
    one, other = states(0, 0), states(0, 0)
    assert identical(one, other) == 1
    other[0]["5"] = one[0]["5"].clone()
    other[0]["5"][3, 5] += 1e-6
    assert 0.99 < identical(one, other) < 1
    assert repeats("w", 0.999, 1.0) and not repeats("w", 1.0, 1.0)
    assert not repeats("w", 0.6, 0.62) and repeats("w", 0.1, 0.62)


def run(workloads: tuple[Workload, ...], noise: float, **more: object) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    made: dict[str, object] = {}
    for workload in workloads:
        lanes = {}
        for lane in workload.lanes:
            exact = EXACT[lane]
            value = exact["5"] + noise * torch.randn(exact["5"].shape, generator=generator)
            lanes[lane] = exact | {"5": value, "final": value, "logits": value[LENGTHS[lane] :]}
        made[workload.name] = lanes
    names = [workload.name for workload in workloads]
    common = {"drafts": 10, "accepted": 12, "status": {"faults": {}}}
    return {
        "states": made,
        "tokens": dict.fromkeys(names, True),
        "fused": dict.fromkeys(names, 3),
        **common,
        **more,
    }


def _exact(seed: int) -> dict[int, dict[str, torch.Tensor]]:
    generator, found = torch.Generator().manual_seed(seed), {}
    for lane, length in enumerate(LENGTHS):
        value = torch.randn(length + ANSWER, 32, generator=generator)
        found[lane] = {"positions": torch.arange(len(value)), "5": value, "final": value}
        found[lane] |= {"logits": value[length:], "logits positions": torch.arange(length, length + ANSWER)}
    return found


EXACT = _exact(5)


def judged(**change: dict[str, object]) -> list[str]:
    spec = SideSpec({"decode": "fused"}, "mini", 6, (5,))
    runs = {"stock": run(STOCK, 0.03), "ours": run(PLAIN, 0.0), "drafted": run(DRAFTED, 0.0)}
    for name, fields in change.items():
        runs[name] |= fields
    return full_size.judge(spec, runs, EXACT, _exact(6), 32)["wrong"]


def test_a_sound_pair_of_engines_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "texts", lambda _: {n: [0] * (x + ANSWER) for n, x in enumerate(LENGTHS)})
    assert judged() == []


def test_every_way_to_be_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "texts", lambda _: {n: [0] * (x + ANSWER) for n, x in enumerate(LENGTHS)})
    names = [workload.name for workload in PLAIN]
    assert (
        "known continuation" in judged(ours={"tokens": dict.fromkeys(names, True) | {"decode 3": False}})[0]
    )
    assert "never took a step" in judged(ours={"fused": dict.fromkeys(names, 0)})[0]
    assert "accepted and rejected" in judged(drafted={"accepted": 0})[0]
    assert "fault x" in judged(ours={"status": {"faults": {"x": "y"}}})[0]
    noisy = judged(ours={"states": run(PLAIN, 0.2)["states"]})
    assert any("decode 1, 5: 0.2" in line for line in noisy) and any("slots reused" in line for line in noisy)


def test_an_engine_that_failed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "texts", lambda _: {n: [0] * (x + ANSWER) for n, x in enumerate(LENGTHS)})
    spec = SideSpec({}, "mini", 6, (5,))
    found = full_size.judge(spec, {"ours": run(PLAIN, 0.0)}, EXACT, _exact(6), 32)
    assert found["wrong"] == [] and list(found["slots"]) == ["slots reused"]
    assert {row["stock"] for row in found["rows"]} == {None}


def test_a_spec_survives_the_way_to_its_process() -> None:
    spec = full_size.sides({"moe": "ling"}, "flash", 12, 6, stock=True)["drafted"]
    assert spec.taps == (5, 11) and as_spec(json.dumps(full_size.asdict(spec))) == spec


def test_a_child_that_fails_or_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_module.py").write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == '{\"hang\": 1}': time.sleep(60)\n"
        "if sys.argv[1] == '{\"write\": 1}': open(sys.argv[2], 'w').write(os.environ['VLLM_LING_DISABLE'])\n"
        "print('the last words')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert sys.executable
    out = tmp_path / "out"
    with pytest.raises(LingError, match="the last words"):
        run_child("child_module", {}, out, stock=False, timeout_s=30)
    with pytest.raises(LingError, match="longer than 1 s"):
        run_child("child_module", {"hang": 1}, out, stock=False, timeout_s=1)
    run_child("child_module", {"write": 1}, out, stock=True, timeout_s=30)
    assert out.read_text() == "1"


@pytest.mark.parametrize("engines", [1, 2])
def test_ctrl_c_ends_the_study_and_its_engines_at_once(engines: int, tmp_path: Path) -> None:
    """The engines run in other threads, which no signal reaches."""
    module = "vllm_ling.eval.studies.full_size"
    command = [sys.executable, "-u", "-m", module, "--model", "mini", "--at-once", str(engines)]
    study = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert study.stdout is not None
    for _ in range(engines):
        next(line for line in study.stdout if "starting" in line)
    time.sleep(0.5)
    children = Path(f"/proc/{study.pid}/task").glob("*/children")
    ours = [int(child) for path in children for child in path.read_text().split()]
    study.send_signal(signal.SIGINT)
    said = study.communicate(timeout=20)[0]
    assert study.returncode and "KeyboardInterrupt" in said
    assert len(ours) == engines and not [child for child in ours if Path(f"/proc/{child}").exists()]
