# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it, against mock servers of known speed: figures, verdicts, interruption, failure."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_ling.eval.demo.table import DemoReport
from vllm_ling.eval.provenance import ROOT

pytestmark = pytest.mark.e2e
TTFT_MS, STEP_MS = 30.0, 16.0
MOCK = [
    sys.executable,
    "-m",
    "vllm_ling.eval.serving.mock_server",
    "--ttft-ms",
    str(TTFT_MS),
    "--step-ms",
    str(STEP_MS),
]
FIELDS = [
    "name",
    "accuracy",
    "items",
    "accept_length",
    "tok_per_s",
    "tpot_ms",
    "ttft_ms",
    "median_output_tokens",
    "flagged",
]
CODE = """
import json, sys
from pathlib import Path
from vllm_ling.cli import main
from vllm_ling.eval.demo import run as demo
demo.run.__kwdefaults__["server"] = json.loads(sys.argv.pop(1))
main()
"""


def start(folder: Path, *words: str, server: Sequence[str] = MOCK) -> subprocess.Popen[str]:
    """`vllm-ling demo ...` in `folder`, with another server command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", CODE, json.dumps(list(server)), "demo", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def servers_of(folder: Path) -> list[int]:
    """Pids of mock servers whose output goes to this folder's logs."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1").startswith(str(folder)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for(folder: Path, text: str, process: subprocess.Popen[str]) -> None:
    """Reads progress lines until one holds `text`."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"never saw {text!r}: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A whole demo: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("good")
    code, out, err = finish(start(folder, "--items", "12", server=[*MOCK, "--wrong-every", "12"]))
    assert err == ""
    return folder, code, out


@pytest.mark.clock
def test_json_has_the_promised_shape(good: tuple[Path, int, str]) -> None:
    content: dict[str, Any] = json.loads((good[0] / "build" / "demo.json").read_text())
    DemoReport.model_validate(content)
    assert list(content) == ["provenance", "stages"]
    assert [stage["name"] for stage in content["stages"]] == [
        "baseline",
        "head",
        "moe",
        "mtp",
        "trap",
        "trap_scale",
    ]
    for stage in content["stages"]:
        assert list(stage) == FIELDS
    details = content["provenance"]["stages"]
    assert details["trap"]["faults"].keys() == {"draft_head"}
    assert details["baseline"] | {"start_s": 0} == {
        "flags": details["baseline"]["flags"],
        "start_s": 0,
        "faults": {},
        "transport_errors": 0,
    }
    assert str(good[0]) not in json.dumps(content)


@pytest.mark.clock
def test_figures_are_those_of_the_servers(good: tuple[Path, int, str]) -> None:
    stages = {s["name"]: s for s in json.loads((good[0] / "build" / "demo.json").read_text())["stages"]}
    for name, stage in stages.items():
        fast = name in ("mtp", "trap_scale")
        tokens_per_step = 2.5 if fast else 1.0
        assert stage["items"] == 12
        assert stage["accuracy"] == pytest.approx(11 / 12)
        assert stage["tpot_ms"] == pytest.approx(STEP_MS / tokens_per_step, rel=0.12), name
        assert stage["tok_per_s"] == pytest.approx(1000 * tokens_per_step / STEP_MS, rel=0.12), name
        assert TTFT_MS <= stage["ttft_ms"] < TTFT_MS + 15
        assert stage["median_output_tokens"] == stages["baseline"]["median_output_tokens"]
        assert stage["flagged"] == name.startswith("trap")
    assert stages["baseline"]["accept_length"] is None
    assert stages["mtp"]["accept_length"] == pytest.approx(2.5, abs=0.05)
    assert stages["trap"]["accept_length"] == 1.0


@pytest.mark.clock
def test_piped_output_is_plain_and_tells_the_story(good: tuple[Path, int, str]) -> None:
    folder, code, out = good
    assert code == 0, out
    assert "\x1b" not in out
    assert "[4/6] mtp: 3 problems one at a time" in out
    assert "trap: caught by the proof at load" in out
    assert "trap_scale: caught only by the proof at load" in out
    assert "FAILED" not in out
    assert servers_of(folder) == []
    assert len(list((folder / "build" / "logs").glob("demo-*.log"))) == 6


def test_broken_bars_are_named_and_fail_the_run(tmp_path: Path) -> None:
    server = [*MOCK, "--wrong-every", "3", "--accept", "2,2"]
    code, out, _ = finish(start(tmp_path, "--items", "12", "--stages", "baseline,mtp", server=server))
    assert code == 1
    assert "FAILED baseline: accuracy 66.7% < 85%" in out
    assert "FAILED mtp: accept length 2.00 < 2.3" in out
    assert (tmp_path / "build" / "demo.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starting the server", "problems one at a time"])
def test_interruption_leaves_no_server_and_no_result(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    # A shell between demo and server, so that the server is a grandchild.
    shell = ["bash", "-c", '"$@" & wait', "bash", *MOCK, "--step-ms", "50"]
    process = start(tmp_path, "--items", "40", server=shell)
    wait_for(tmp_path, moment, process)
    deadline = time.monotonic() + 20
    while not servers_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert servers_of(tmp_path)
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 128 + number
    assert servers_of(tmp_path) == []
    assert "Traceback" not in out + err
    assert not (tmp_path / "build" / "demo.json").exists()


def test_a_failing_server_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    code, out, err = finish(
        start(tmp_path, server=["bash", "-c", "seq 100; echo no memory left; exit 9", "bash"])
    )
    assert code == 2
    shown = out.splitlines()
    assert shown[-1] == "no memory left" and "72" in shown and "71" not in shown
    assert err == "vllm-ling: error: the server died with exit code 9 (log: build/logs/demo-baseline.log)\n"


def test_a_server_that_dies_under_way_is_noticed(tmp_path: Path) -> None:
    shell = ["bash", "-c", '"$@" & sleep 2; kill $!; echo gone', "bash", *MOCK, "--step-ms", "40"]
    code, out, err = finish(start(tmp_path, "--items", "40", "--stages", "baseline", server=shell))
    assert code == 2
    assert out.splitlines()[-1] == "gone"
    assert "died with exit code 0" in err
