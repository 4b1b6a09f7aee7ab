# SPDX-License-Identifier: Apache-2.0
"""`bench kernels` without a GPU: refusals and the result's form; and the model folder that the engines get."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
        assert row["us_low"] <= row["us"] <= row["us_high"]
        # The floor's bandwidth is a copy's, half of it writes; the head, all reads, came 2% under it.
        assert row["floor_us"] is None or row["us"] >= 0.97 * row["floor_us"]
        assert row["rms_error"] is None or row["rms_error"] <= 5e-3
    stock = ("moe_block", 1), ("moe_block", 4), ("lm_head", 1), ("kda_in_proj", 1), ("moe_prefill", 4096)
    assert all(rows[key]["stock_us"] for key in stock)
    one = rows["moe_block", 1]
    assert one["dram_bytes"] <= 1.1 * one["floor_bytes"]


@pytest.mark.parametrize(("model", "layers"), [("flash", 18), ("mini", 6)])
def test_model_folder_is_a_valid_config(tmp_path: Path, model: str, layers: int) -> None:
    shape = LingShape.from_folder(model_folder(tmp_path, model, layers, mtp=True))
    assert shape.fmt == "fp4" and len(list(tmp_path.iterdir())) == 1
