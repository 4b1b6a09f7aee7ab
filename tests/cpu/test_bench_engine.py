# SPDX-License-Identifier: Apache-2.0
"""`bench decode` with a whole engine in a process of its own, on the CPU: what its looks bring back, and its end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.process_state import ends
from vllm_ling.bench.processes import run_limited
from vllm_ling.bench.side import Side, read_answer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def command(side: Side, answer: Path) -> Sequence[str]:
    program = "tests.cpu.engine_in_own_process"
    return [sys.executable, "-m", program, json.dumps(asdict(side)), str(answer)]


def test_looks_come_back_from_the_engines_process(tmp_path: Path, one_thread: dict[str, str]) -> None:
    side = Side({}, "mini", 6, (16, 24), draft_tokens=2, accept_length=2.0, repeats=1, tokens=40)
    path, log = tmp_path / "answer.json", tmp_path / "log"
    env = os.environ | one_thread | {"PYTHONPATH": str(ROOT)}
    assert run_limited(command(side, path), env, log, 300) == 0, log.read_text()[-3000:]
    answer = read_answer(json.loads(path.read_text()))
    assert answer.engine == "own process" and answer.async_scheduling is False and not answer.notes
    # The plugin chose there, not here.
    assert answer.choices["moe mxfp4"][0] == "torch"
    for decoded in answer.decoded:
        # A busy machine sleeps longer than it is told.
        assert decoded.graph_ms is not None and decoded.graph_ms >= 2
        assert decoded.host is not None
        assert decoded.host.busy_ms > decoded.host.launch_ms >= 2 and decoded.host.wait_ms >= 1
        # What came out here, divided by what was replayed there.
        assert decoded.accept_length is not None and 1 <= decoded.accept_length < 1.3
    assert answer.steps is not None
    assert (answer.steps.steps, answer.steps.launches, answer.steps.graph_ms) == (5, 3, 0.2)
    assert answer.steps.kernels == [("moe", 2.0, 200.0), ("head", 1.0, 50.0)]


def test_nothing_of_an_engine_is_left_when_the_bench_is_killed(
    tmp_path: Path, one_thread: dict[str, str]
) -> None:
    side = Side({}, "mini", 6, (16,), repeats=50, tokens=2000)
    path, log = tmp_path / "answer.json", tmp_path / "log"
    code = (
        "import os\nfrom pathlib import Path\nfrom vllm_ling.bench.processes import run_limited\n"
        f"run_limited({command(side, path)!r}, os.environ, Path({str(log)!r}), 300)"
    )
    env = os.environ | one_thread | {"PYTHONPATH": str(ROOT)}
    bench = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        for _ in range(1200):
            if path.exists() or bench.poll() is not None:
                break
            time.sleep(0.1)
        assert path.exists(), log.read_text()[-3000:]
        found = {name: int(number) for name, number in re.findall(r"\((\w+) pid=(\d+)\)", log.read_text())}
        assert found.keys() == {"MainProcess", "EngineCore"}
    finally:
        bench.kill()
        bench.wait()
    gone = ends(found["MainProcess"]), ends(found["EngineCore"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(found["MainProcess"], signal.SIGKILL)  # of a test that fails, nothing is left either
    assert gone == (True, True)
