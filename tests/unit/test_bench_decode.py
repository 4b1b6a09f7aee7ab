# SPDX-License-Identifier: Apache-2.0
"""`bench decode` without a GPU: which engines run, what goes on disk when, and what a failure costs."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.process_state import ends, over
from vllm_ling.bench import decode as bench_decode
from vllm_ling.bench.dram import Traffic
from vllm_ling.bench.floor import floor_bytes
from vllm_ling.bench.host import Host
from vllm_ling.bench.processes import needing, run_limited
from vllm_ling.bench.side import Answer, Decoded, Extra, Side, read_answer
from vllm_ling.bench.trace import Steps
from vllm_ling.cli import app
from vllm_ling.errors import LingError
from vllm_ling.roofline.predict import read_results

STEPS = Steps(20, 402.0, 2.0, 1.6, 1.5, 2.4, [("moe_block", 41.0, 900.0), ("head", 1.0, 110.0)])
NAMES = {
    "workload",
    "context",
    "ms_per_token",
    "gpu_ms_per_step",
    "stock_ms_per_token",
    "launches_per_token",
    "dram_bytes_per_token",
    "floor_bytes_per_token",
}


def answer(side: Side, ms: float) -> Answer:
    if side.extras:
        extras = [Extra("batch32", 10 * ms, 9 * ms, 11 * ms)]
        return Answer([], 40.0, {}, "own process", True, extras=extras)
    decoded = [
        Decoded(c, ms, ms - 0.1, ms + 0.1, graph_ms=1.5, host=Host(1.2, 0.1, 0.7)) for c in side.contexts
    ]
    choices = {"moe": ["ling", "few tokens"]}
    return Answer(decoded, 40.0, choices, "own process", True, steps=STEPS, clocks="1980 MHz")


def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str, fail: str = "") -> tuple[Result, Any]:
    """Runs the command with engines that answer 2 ms (ours) and 5 ms (stock) at once; `fail` names one that cannot."""

    def time_side(side: Side, timeout_s: float) -> Answer:
        name = "stock" if side.options is None else "ours"
        if f"{name} {side.workload}" == fail:
            raise LingError(f"bench decode: {name} failed: out of memory in {tmp_path}/model")
        return answer(side, 5.0 if side.options is None else 2.0)

    monkeypatch.setattr(bench_decode, "time_side", time_side)
    out = tmp_path / "decode.json"
    done = CliRunner().invoke(app, ["bench", "decode", *words, "--out", str(out)])
    return done, json.loads(out.read_text()) if out.exists() else None


def test_one_call_fills_both_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--against", "stock", "--draft", "0", "--draft", "3", "--context", "128", "--context", "4096"]
    done, found = bench(monkeypatch, tmp_path, *words, "--extras", "also")
    assert done.exit_code == 0 and "mtp3@2.68, context 4096: 2.50 x as fast" in done.output
    rows = {(row["workload"], row["context"]): row for row in found["rows"]}
    assert [*rows] == [("plain", 128), ("plain", 4096), ("mtp3@2.68", 128), ("mtp3@2.68", 4096)]
    assert all(row.keys() >= NAMES and row["stock_ms_per_token"] == 5.0 for row in rows.values())
    # The trace's head, sampling and copies (2.0 - 1.6) come on top of the graph as it runs without a profiler.
    assert rows["plain", 128]["host_ms_per_step"] == {"busy_ms": 1.2, "launch_ms": 0.1, "wait_ms": 0.7}
    assert rows["plain", 128]["gpu_ms_per_step"] == pytest.approx(1.5 + 0.4)
    assert rows["mtp3@2.68", 128]["launches_per_token"] == pytest.approx(402 / 2.68)
    assert rows["plain", 4096]["launches_per_token"] is None
    assert found["kernels"]["ours plain 128"][0] == ["moe_block", 41.0, 900.0]
    assert found["extras"] == [
        {"workload": "batch32", "ms": 20.0, "spread_ms": [18.0, 22.0], "engine": "own process"}
        | {"stock_ms": 50.0, "stock_spread_ms": [45.0, 55.0], "stock_engine": "own process"}
    ]
    assert all(row["engine"] == row["stock_engine"] == "own process" for row in rows.values())
    assert found["engines"]["stock plain"]["async_scheduling"] is True
    assert "Engine in: own process, async scheduling on." in (tmp_path / "decode.md").read_text()
    assert [*found["engines"]] == [
        f"{s} {w}" for w in ("plain", "mtp3@2.68", "extras") for s in ("ours", "stock")
    ]
    assert len(read_results(tmp_path / "decode.json")[0]) == 4


@pytest.mark.parametrize("fail", ["ours plain", "stock plain", "stock mtp3@2.68"])
def test_a_failing_engine_loses_only_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail: str
) -> None:
    words = ["--against", "stock", "--draft", "0", "--draft", "3"]
    done, found = bench(monkeypatch, tmp_path, *words, fail=fail)
    assert done.exit_code == 1 and f"{fail}: FAILED: bench decode" in done.output
    assert [*found["errors"]] == [fail] and "out of memory in model" in found["errors"][fail]
    assert len(found["engines"]) == 3
    assert fail not in found["engines"]
    values = [value for row in found["rows"] for name, value in row.items() if name.endswith("ms_per_token")]
    assert (values.count(2.0), values.count(5.0)) == ((1, 2) if fail == "ours plain" else (2, 1))
    # A row without our figure is passed over by those who read the file.
    assert len(read_results(tmp_path / "decode.json")[0]) == (1 if fail == "ours plain" else 2)


def test_every_engine_is_written_when_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"

    def time_side(side: Side, timeout_s: float) -> Answer:
        if side.options is None:
            raise KeyboardInterrupt
        return answer(side, 2.0)

    monkeypatch.setattr(bench_decode, "time_side", time_side)
    CliRunner().invoke(app, ["bench", "decode", "--against", "stock", "--out", str(out)])
    assert json.loads(out.read_text())["rows"][0]["ms_per_token"] == 2.0


def test_variants_of_ours_get_names_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variants = ['{"moe": "ling", "linear": "ling"}', '{"moe": "humming", "lm_head": "bf16"}']
    done, found = bench(monkeypatch, tmp_path, "--ours", variants[0], "--ours", variants[1])
    assert done.exit_code == 0 and found["engines"]["ours2 plain"]["options"] == json.loads(variants[1])
    (row,) = found["rows"]
    assert row["ours2_ms_per_token"] == 2.0
    head = 157184 * 2560 - 157184 * 4  # BF16 instead of FP8 and its scales
    assert row["ours2_floor_bytes_per_token"] - row["floor_bytes_per_token"] == head


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "1", "--accept-length", "2.68"], "between 1 and 2"),
        (["--ours", "moe=ling"], "--ours moe=ling: expected a JSON object"),
        (["--ours", '{"mode": "ling"}'], "unknown option ling.mode"),
    ],
)
def test_refused_before_any_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    done, found = bench(monkeypatch, tmp_path, *words)
    assert isinstance(done.exception, LingError) and message in str(done.exception) and found is None


def test_merge_keeps_other_rows_and_nothing_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traffic = Traffic(4.5e9, 0.1e9, "ncu")
    monkeypatch.setattr(bench_decode, "step_traffic", lambda side: traffic)
    _, first = bench(monkeypatch, tmp_path, "--against", "stock", "--dram")
    assert first["rows"][0]["dram_bytes_per_token"] == 4.6e9
    done, found = bench(monkeypatch, tmp_path, "--draft", "3", "--draft", "0", "--merge")
    assert done.exit_code == 0 and found["earlier"] == [first["provenance"]]
    plain, mtp = found["rows"]
    assert (plain["workload"], mtp["workload"]) == ("plain", "mtp3@2.68")
    assert plain["stock_ms_per_token"] == 5.0 and plain["dram_bytes_per_token"] is None
    (tmp_path / "decode.json").write_text("{}")
    done, _ = bench(monkeypatch, tmp_path, "--merge")
    assert isinstance(done.exception, LingError) and "--merge" in str(done.exception)


def test_dram_reason_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traffic = Traffic(None, None, "ncu is not on the PATH")
    monkeypatch.setattr(bench_decode, "step_traffic", lambda side: traffic)
    done, found = bench(monkeypatch, tmp_path, "--dram", "--against", "stock")
    assert done.exit_code == 0 and found["rows"][0]["dram_note"] == "ncu is not on the PATH"
    assert found["rows"][0]["dram_bytes_per_token"] is None


def fake_worker(monkeypatch: pytest.MonkeyPatch, code: int | None, given: Answer | None) -> None:
    def run(command: list[str], env: dict[str, str], log: Path, timeout_s: float) -> int | None:
        log.write_text("RuntimeError: illegal memory access")
        if given is not None:
            Path(command[-1]).write_text(json.dumps(asdict(given)))
        return code

    monkeypatch.setattr(bench_decode, "run_limited", run)


def test_what_an_engine_measured_before_it_ended_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side({"moe": "ling"})
    given = answer(side, 2.0)
    fake_worker(monkeypatch, 0, given)
    assert bench_decode.time_side(side, 60) == given == read_answer(json.loads(json.dumps(asdict(given))))
    for code, reason in ((1, "failed: RuntimeError"), (None, "took longer than 60 s (--timeout)")):
        fake_worker(monkeypatch, code, given)
        found = bench_decode.time_side(side, 60)
        assert found.decoded == given.decoded and reason in found.failed
        for nothing in (None, Answer([], 40.0, {})):
            fake_worker(monkeypatch, code, nothing)
            with pytest.raises(LingError, match="illegal memory access"):
                bench_decode.time_side(side, 60)


def test_a_run_over_its_limit_leaves_no_child(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    assert run_limited([sys.executable, "-c", code], os.environ, log, 3) is None
    assert ends(int(log.read_text())), "the child still runs"
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], os.environ, log, 30) == 3


def test_a_killed_measurement_takes_its_engine_along(tmp_path: Path) -> None:
    """SIGKILL runs no code of ours, and an engine left behind would keep the GPU's memory."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom vllm_ling.bench.processes import run_limited\n"
        "engine = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)']\n"
        f"run_limited(engine, os.environ, Path({str(tmp_path / 'log')!r}), 60)"
    )
    log = tmp_path / "log"
    middle = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(300):
        if log.exists() and log.read_text():
            break
        time.sleep(0.1)
    middle.kill()
    middle.wait()
    assert ends(int(log.read_text())), "the engine still runs"


TIED = """
import multiprocessing, os, sys, time
from vllm_ling.bench.processes import tie_children

def engine():
    os.setsid()  # out of the group that is killed
    print(os.getpid(), flush=True)
    time.sleep(60)

tie_children()
multiprocessing.get_context("fork").Process(target=engine).start()
time.sleep(60)
"""


def test_a_forked_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also when no group is killed: SIGKILL of the measurement reaches its child, but not the child's child."""
    log = tmp_path / "log"
    with log.open("w") as output:
        middle = subprocess.Popen([sys.executable, "-c", TIED], stdout=output)
    for _ in range(300):
        if log.read_text():
            break
        time.sleep(0.1)
    engine = int(log.read_text())
    assert Path(f"/proc/{engine}").exists() and middle.poll() is None
    middle.kill()
    middle.wait()
    assert ends(engine), "the engine still runs"


def test_the_group_is_over_when_a_run_returns(tmp_path: Path) -> None:
    """A killed engine needs a moment for its memory: the next one must not start into that."""
    code = (
        "import subprocess, sys\n"
        "engine = 'import time; x = b\"x\" * (1 << 29); print(1, flush=True); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', engine], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)"
    )
    log = tmp_path / "log"
    assert run_limited([sys.executable, "-c", code], os.environ, log, 30) == 0
    assert over(int(log.read_text()))


def test_a_wait_for_an_engine_that_died_ends(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\nfrom vllm_ling.bench.processes import needing\n"
        "engine = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)'])\n"
        "with needing(engine.pid, grace_s=0.1):\n    time.sleep(60)"
    )
    log = tmp_path / "log"
    began = time.monotonic()
    assert run_limited([sys.executable, "-c", code], os.environ, log, 50) == 1
    assert "ended before its work was done" in log.read_text() and time.monotonic() - began < 30
    # An engine that ends after the work, or just before it is over, is none of its business.
    engine = subprocess.Popen([sys.executable, "-c", "pass"])
    with needing(engine.pid, grace_s=60):
        engine.wait()


def test_floor_follows_workload_context_and_head() -> None:
    ours, stock = Side({}), Side(None)
    assert floor_bytes(ours, 0) == pytest.approx(4.52e9, rel=4e-3)
    assert floor_bytes(stock, 0) == pytest.approx(4.93e9, rel=4e-3)
    assert floor_bytes(ours, 32768) - floor_bytes(ours, 0) == 7 * 576 * 2 * 32768
    drafting = {"draft_tokens": 3, "accept_length": 2.69}
    assert floor_bytes(Side({}, **drafting), 0) == pytest.approx(3.31e9, rel=4e-3)
    # Only the head of the verification is larger.
    more = (floor_bytes(Side(None, **drafting), 0) - floor_bytes(Side({}, **drafting), 0)) * 2.69
    assert more == pytest.approx(157184 * (2560 - 4), abs=10)


class SlowEngine:
    """Two prompts of 50 ms, then a step of 2 ms for every `burst` tokens of each request."""

    def __init__(self, burst: int) -> None:
        self._burst, self._lengths, self._left = burst, dict[str, int](), dict[str, int]()
        self.llm_engine, self.vllm_config = self, SimpleNamespace(model_config=self)

    def get_vocab_size(self) -> int:
        return 1000

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert len(prompt["prompt_token_ids"]) == 8 and params.ignore_eos
        self._left[name] = params.max_tokens

    def step(self) -> list[Any]:
        waiting = [name for name in self._left if name not in self._lengths]
        time.sleep(0.05 if waiting else 0.002)
        for name in waiting[:1] or list(self._left):
            self._lengths[name] = min(
                self._lengths.get(name, 0) + (1 if waiting else self._burst), self._left[name]
            )
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[0] * length, logprobs=None)],
                finished=length == self._left[name],
            )
            for name, length in self._lengths.items()
        ]


@pytest.mark.parametrize(("sequences", "burst"), [(1, 1), (2, 1), (1, 4)])
@pytest.mark.clock
def test_time_per_token_leaves_the_prompts_out(sequences: int, burst: int) -> None:
    from vllm_ling.bench.worker import token_times

    found = token_times(SlowEngine(burst), 8, 80, sequences)
    assert 0.002 / burst <= found < 0.004 / burst


def test_too_short_an_answer_is_not_timed() -> None:
    from vllm_ling.bench.worker import token_times

    with pytest.raises(ValueError, match="10 tokens are too few"):
        token_times(SlowEngine(1), 8, 10)
