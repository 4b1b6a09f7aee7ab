# SPDX-License-Identifier: Apache-2.0
"""The benches without a GPU: refusals, the result's form, and what goes on disk when."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ling.bench import decode as bench_decode
from vllm_ling.bench.decode import Answer, Decoded, Side
from vllm_ling.bench.engine import model_folder
from vllm_ling.bench.kernels import Row, with_stock
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.cli import app
from vllm_ling.errors import LingError

RESULT = Path("eval/results/h200-kernels.json")


def test_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "kernels", "--out", str(tmp_path / "kernels.json")])
    assert isinstance(done.exception, LingError) and "no CUDA device" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_stock_figures_go_to_their_rows() -> None:
    rows = [Row("moe_block", tokens, 20.0, 19.0, 21.0, 8.6) for tokens in (1, 2)]
    data = with_stock(rows, {("moe_block", 1): 70.0, ("lm_head", 1): 189.0})
    assert [row["stock_us"] for row in data] == [70.0, None]


def test_published_kernel_result_has_the_names_that_others_read() -> None:
    data = json.loads(RESULT.read_text())
    assert data["provenance"]["gpus"] and data["provenance"]["packages"]["vllm"]
    rows = {(row["kernel"], row["tokens"]): row for row in data["rows"]}
    assert {"moe_block", "lm_head", "lm_head_argmax", "kda_in_proj"} <= {kernel for kernel, _ in rows}
    for row in rows.values():
        assert row["us_low"] <= row["us"] <= row["us_high"] and row["us"] >= row["floor_us"]
        assert row["rms_error"] is None or row["rms_error"] <= 5e-3
    one = rows["moe_block", 1]
    assert one["dram_bytes"] <= 1.1 * one["floor_bytes"]


@pytest.mark.parametrize(("model", "layers"), [("flash", 18), ("mini", 6)])
def test_model_folder_is_a_valid_config(tmp_path: Path, model: str, layers: int) -> None:
    shape = LingShape.from_folder(model_folder(tmp_path, model, layers, mtp=True))
    assert shape.fmt == "fp4" and len(list(tmp_path.iterdir())) == 1


def answers(ms: dict[bool, float]) -> object:
    def time_side(side: Side, timeout_s: float) -> Answer:
        value = ms[side.options is None]
        if value < 0:
            raise LingError("bench decode: stock vLLM failed: out of memory")
        return Answer([Decoded(c, value, value, value) for c in side.contexts], 1.0, {})

    return time_side


def test_decode_sets_the_sides_beside_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_decode, "time_side", answers({False: 2.0, True: 5.0}))
    out = tmp_path / "decode.json"
    arguments = [
        "bench",
        "decode",
        "--against",
        "stock",
        "--draft",
        "3",
        "--context",
        "128",
        "--context",
        "4096",
    ]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert done.exit_code == 0 and "mtp3@2.68, context 4096: 2.50 x as fast" in done.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["workload"], row["context"], row["stock_ms_per_token"]) for row in rows] == [
        ("mtp3@2.68", 128, 5.0),
        ("mtp3@2.68", 4096, 5.0),
    ]


def test_a_failing_side_loses_nothing_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_decode, "time_side", answers({False: 2.0, True: -1.0}))
    out = tmp_path / "decode.json"
    done = CliRunner().invoke(app, ["bench", "decode", "--against", "stock", "--out", str(out)])
    assert isinstance(done.exception, LingError) and "out of memory" in str(done.exception)
    assert json.loads(out.read_text())["rows"][0]["ms_per_token"] == 2.0


def test_accept_length_must_be_possible() -> None:
    done = CliRunner().invoke(app, ["bench", "decode", "--draft", "1", "--accept-length", "2.68"])
    assert isinstance(done.exception, LingError) and "between 1 and 2" in str(done.exception)
