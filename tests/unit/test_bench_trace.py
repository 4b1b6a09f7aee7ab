# SPDX-License-Identifier: Apache-2.0
"""A trace becomes steps, ncu's output becomes bytes, replays are watched, results become text: all without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from vllm_ling.bench import dram, host
from vllm_ling.bench.dram import READ, WRITE, counters, step_traffic
from vllm_ling.bench.graphs import counted, on_replay
from vllm_ling.bench.side import Side
from vllm_ling.bench.trace import short_name, steps_of
from vllm_ling.cli import app
from vllm_ling.errors import LingError


def event(name: str, start: float, us: float, number: int, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us, "args": {"correlation": number}}


def decoding(steps: int, listed: bool = True) -> list[dict[str, Any]]:
    """A prefill, then steps of 1000 us: graph 0-100-[gap 20]-300, head 350-450, copy 440-460, draft graph 500-540."""
    events = [event("prefill", 10.0 * i, 9.0, 1 + i) for i in range(20)]
    for step in range(steps):
        at, number = 1000.0 * (step + 1), 100 + 10 * step
        events += [
            event("void ling::moe<4>(int*)", at, 100, number),
            event("void ling::moe<4>(int*)", at + 120, 180, number),
            event("head", at + 350, 100, number + 1),
            event("Memcpy DtoH", at + 440, 20, number + 2, "gpu_memcpy"),
            event("draft", at + 500, 10, number + 3),
            event("draft", at + 530, 10, number + 3),
            {"ph": "X", "cat": "cpu_op", "name": "nothing", "ts": at, "dur": 900.0},
        ]
        if listed:
            events += [event("cudaGraphLaunch", at - 50, 5, number + n, "cuda_runtime") for n in (0, 3)]
    return events


@pytest.mark.parametrize("listed", [True, False])
def test_steps_go_from_graph_to_graph(listed: bool) -> None:
    found = steps_of(decoding(12, listed))
    assert (found.steps, found.launches, found.period_ms) == (9, 6, 1.0)
    # Graphs with the gaps inside, the copy's overlap with the head once, no waits between.
    assert found.gpu_ms == pytest.approx(0.300 + 0.110 + 0.040)
    assert found.graph_ms == pytest.approx(0.300)
    assert found.kernel_ms == pytest.approx(0.100 + 0.180 + 0.100 + 0.010 + 0.020)
    assert found.kernels[0] == ("ling::moe<4>", 2, 280)
    assert [name for name, _, _ in found.kernels] == ["ling::moe<4>", "head", "draft", "Memcpy DtoH"]


def test_a_kernel_that_starts_early_is_charged_from_the_end_of_the_one_before() -> None:
    events = []
    for step in range(8):
        at, number = 1000.0 * step, 10 * step + 1
        # The second waits for the first from 20 on, the third ends inside the second.
        events += [event("first", at, 100, number), event("second", at + 20, 130, number)]
        events += [event("third", at + 30, 40, number), event("last", at + 160, 10, number)]
    found = steps_of(events)
    assert dict((name, us) for name, _, us in found.kernels) == {
        "first": 100,
        "second": 50,
        "third": 0,
        "last": 10,
    }
    assert found.kernel_ms == pytest.approx(0.160) and found.gpu_ms == pytest.approx(0.170)


def test_a_graph_of_one_kernel_is_known_by_its_launch() -> None:
    events = [e for e in decoding(8) if e["name"] == "cudaGraphLaunch" or e["ts"] % 1000 in (0, 350)]
    found = steps_of(events)
    assert (found.steps, found.launches) == (5, 2) and found.graph_ms == pytest.approx(0.1)


@pytest.mark.parametrize("events", [[], decoding(0), decoding(4)])
def test_too_short_a_trace_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="too few whole steps"):
        steps_of(events)


def test_kernel_names_are_readable() -> None:
    name = "void (anonymous namespace)::gemm<cutlass::Shape<int (*)(float), 4>, true>(float*, int)"
    assert short_name(name) == "gemm<cutlass::Shape<int (*)(float), 4>, true>"
    assert short_name("_fwd_kernel") == "_fwd_kernel"
    assert len(short_name("void f<" + "a" * 300 + ">(int)")) == 90


HEADER = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'


def ncu_text(*rows: tuple[str, str]) -> str:
    lines = [f'"{i}","graph","{metric}","byte","{value}"\n' for i, (metric, value) in enumerate(rows)]
    return "==PROF== Connected\nINFO engine\n" + HEADER + "".join(lines) + 'INFO "done"\n'


def test_counters_are_summed_over_launches() -> None:
    text = ncu_text((READ, "1,500"), (WRITE, "10"), (READ, "500"))
    assert counters(text) == {READ: (2000.0, 2), WRITE: (10.0, 1)}


@pytest.mark.parametrize(
    "text",
    ["", "==ERROR== no permission", HEADER, '"one","two"\n"3"\n', ncu_text((READ, "n/a"), (READ, "5"))],
)
def test_garbage_is_no_count(text: str) -> None:
    assert counters(text) == {}


def ncu(
    monkeypatch: pytest.MonkeyPatch, *answers: tuple[int | None, str]
) -> tuple[Callable[..., int | None], list[Any]]:
    monkeypatch.setattr(dram.shutil, "which", lambda name: "/opt/ncu")
    left, asked = [*answers], []

    def run(command: list[str], env: dict[str, str], log: Path, timeout_s: float) -> int | None:
        code, text = left.pop(0) if left else (None, "")
        asked.append(Side(**json.loads(command[-1])))
        log.write_text(text)
        return code

    return run, asked


def test_traffic_of_the_whole_from_two_small_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = ncu_text((READ, "2000"), (WRITE, "20")), ncu_text((READ, "3200"), (WRITE, "40"))
    run, asked = ncu(monkeypatch, (0, few), (0, more))
    found = step_traffic(Side({}), run=run)
    assert [side.layers for side in asked] == [6, 12]
    # Of two steps: 1000 bytes for 6 layers and what is beside them, 600 for 6 more.
    assert (found.read, found.written) == (1000 + 6 * 600, 10 + 6 * 10) and found.total == 4670
    run, asked = ncu(monkeypatch, (0, few))
    assert step_traffic(Side({}, layers=6), run=run).read == 1000 and len(asked) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            (1, "==ERROR== ERR_NVGPUCTRPERM"),
            "ncu ended with 1, counters of nothing: ==ERROR== ERR_NVGPUCTRPERM",
        ),
        ((None, ncu_text((READ, "1"), (WRITE, "1"))), "6 layers: ncu ran out of time"),
        ((0, ncu_text((READ, "2000"))), f"counters of ['{READ}']"),
    ],
)
def test_traffic_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, given: tuple[int | None, str], reason: str
) -> None:
    run, asked = ncu(monkeypatch, given)
    found = step_traffic(Side({}), run=run)
    assert found.total is None and reason in found.note and "by node" in found.note and len(asked) == 2


def test_kernel_by_kernel_where_a_graph_cannot_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    good = ncu_text((READ, "2000"), (WRITE, "20"))
    run, _ = ncu(monkeypatch, (1, "==ERROR== unsupported graph\n" + "log\n" * 900), (0, good), (0, good))
    found = step_traffic(Side({}), run=run)
    assert found.total == 1010 and found.note.startswith("ncu by node")
    run, asked = ncu(monkeypatch, (1, "==ERROR== unsupported graph\n" + "log\n" * 900))
    assert "unsupported graph" in step_traffic(Side({}), run=run).note
    assert "no time left" in step_traffic(Side({}), timeout_s=0, run=run).note and len(asked) == 2


def test_without_ncu_or_with_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram.shutil, "which", lambda name: None)
    assert step_traffic(Side({})).note == "ncu is not on the PATH"
    monkeypatch.setattr(dram.shutil, "which", lambda name: "/nowhere/ncu")
    assert "FileNotFoundError" in step_traffic(Side({})).note


def test_replays_are_counted_and_torch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Any] = []

    def plain(graph: Any) -> None:
        played.append(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", plain)
    a, b = object(), object()
    with counted() as counts:
        for graph in (a, b, a):
            torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
    assert counts == {id(a): 2, id(b): 1} and played == [a, b, a]
    with pytest.raises(RuntimeError), on_replay(lambda graph, replay: replay()):
        raise RuntimeError
    assert torch.cuda.CUDAGraph.replay is plain


def result() -> dict[str, Any]:
    steps = {"steps": 20, "launches": 402.0, "kernel_ms": 1.5}
    return {
        "provenance": {"gpus": ["NVIDIA H200"]},
        "bandwidth": 4.3e12,
        "rows": [
            {
                "workload": "mtp3@2.68",
                "context": 128,
                "ms_per_token": 1.0,
                "spread_ms": [0.9, 1.1],
                "stock_ms_per_token": 3.0,
                "gpu_ms_per_step": 2.4,
                "launches_per_token": 150.2,
                "dram_bytes_per_token": None,
                "floor_bytes_per_token": 3_310_000_000,
                "floor_share": 0.77,
            },
            {"workload": "plain", "context": 128, "stock_ms_per_token": 5.0}
            | dict.fromkeys(
                ("ms_per_token", "gpu_ms_per_step", "launches_per_token", "dram_bytes_per_token"), None
            )
            | {"floor_bytes_per_token": None},
        ],
        "extras": [{"workload": "prefill8192", "ms": 200.0}],
        "kernels": {"ours mtp3@2.68 128": [["moe&co<1, 2>", 41.0, 900.0], ["head", 4.0, 440.0]]},
        "engines": {
            "ours mtp3@2.68": {"start_s": 41.2, "accept_length": 2.68, "draft_tokens": 3, "steps": steps}
        },
        "errors": {"ours plain": "out of\nmemory"},
    }


def test_report_beside_the_result(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(result()))
    done = CliRunner().invoke(app, ["bench", "report", str(path)])
    assert done.exit_code == 0
    text = path.with_suffix(".md").read_text()
    assert (
        "| mtp3@2.68, 128 | 1.00 (0.90-1.10) | 3.00 | 3.00 x | 2.40 (stock -) | 150 (stock -) | - / 3.31 (77%"
        in text
    )
    assert "| plain, 128 | - | 5.00 | - |" in text and "| prefill8192 | 200.00 | - | - |" in text
    assert "ours mtp3@2.68 41" in text and "FAILED: ours plain: ...out of memory" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    drawing = ElementTree.fromstring(path.with_suffix(".svg").read_text())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    said = " ".join(drawing.itertext())
    # Microseconds a round: end to end 1.0 ms x 2.68, floor 3.31 GB x 2.68 at 4.3 TB/s, kernels not listed 1500 - 1340.
    for words in (
        "end to end: 2680",
        "floor: bytes at the bandwidth of memory: 2063",
        "moe&co (41 x): 900",
    ):
        assert words in said
    assert "other kernels: 160" in said and "stock, end to end: 8040" in said


def test_report_without_a_trace_has_no_plot(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(result() | {"kernels": {}}))
    CliRunner().invoke(app, ["bench", "report", str(path)])
    assert path.with_suffix(".md").exists() and not path.with_suffix(".svg").exists()


@pytest.mark.parametrize("text", [None, "{}", "[", '{"rows": [{}]}'])
def test_report_refuses_what_is_no_result(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "decode.json"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(app, ["bench", "report", str(path)])
    assert isinstance(done.exception, LingError) and str(path) in str(done.exception)


def test_what_the_cpu_does_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 10 ms: 2 ms launch the model's graph, 1 ms a draft's, 4 ms wait for the GPU."""
    clock = [0.0]

    def spends(ms: dict[Any, float]) -> Callable[[Any], None]:
        def act(what: Any) -> None:
            clock[0] += ms[what] / 1e3

        return act

    wait = spends({"event": 4})
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", spends({"model": 2, "draft": 1}))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", wait)
    replay, synchronize = torch.cuda.CUDAGraph, torch.cuda.Event
    with host.watched() as watch:
        for _ in range(24):
            replay.replay("model")  # type: ignore[arg-type]
            replay.replay("draft")  # type: ignore[arg-type]
            clock[0] += 0.003
            synchronize.synchronize("event")  # type: ignore[arg-type]
    found = watch.host("model")
    assert (found.busy_ms, found.launch_ms, found.wait_ms) == pytest.approx((6, 3, 4))
    assert torch.cuda.Event.synchronize is wait
    with pytest.raises(ValueError, match="0 launches of the model's graph are too few"):
        watch.host("another")
    # As of a V1 runner, whose events cannot be wrapped: its waiting is not the CPU's own work.
    watch.waits.clear()
    with pytest.raises(ValueError, match="no wait for the GPU was seen"):
        watch.host("model")
