# SPDX-License-Identifier: Apache-2.0
"""The byte model gives the published table of Ling-3.0-flash, and agrees with a real checkpoint's files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ling import cli
from vllm_ling.checkpoint.headers import read_headers
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.errors import LingError
from vllm_ling.roofline.bytes import ByteModel, accept_length, expected_union
from vllm_ling.roofline.machines import MACHINES, machine, matching_gpu, measure
from vllm_ling.roofline.models import model_shape
from vllm_ling.roofline.predict import read_results

GB = 1e9
# Tables are rounded to 0.01 GB, and leave out convolutions and the KDA beta projection (0.009 GB).
ROUNDED = 0.0155 * GB


def flash(head: str = "fp8", context: int = 0) -> ByteModel:
    return ByteModel(model_shape("flash", "fp4"), head=head, context=context)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "gigabytes"),
    [
        ("KDA projections", 2.20),
        ("MLA projections", 0.22),
        ("dense MLP", 0.09),
        ("shared expert", 0.24),
        ("router", 0.21),
        ("routed experts", 1.00),
        ("output head", 0.40),
        ("KDA state", 0.15),
        ("MLA KV cache", 0.26),
    ],
)
def test_parts_of_a_flash_token(part: str, gigabytes: float) -> None:
    found = {entry.name: entry.bytes for entry in flash(context=32768).parts()}
    assert found[part] == pytest.approx(gigabytes * GB, abs=ROUNDED)


def test_totals_and_floors() -> None:
    assert flash("bf16").step_bytes() == pytest.approx(4.93 * GB, abs=ROUNDED)
    assert flash("fp8").step_bytes() == pytest.approx(4.52 * GB, abs=ROUNDED)
    floors = {"h200": (1.15, 1.05), "gb10": (18.1, 16.6), "gb10-achievable": (21.0, 19.2)}
    for name, expected in floors.items():
        for head, milliseconds in zip(("bf16", "fp8"), expected, strict=True):
            found = MACHINES[name].milliseconds(flash(head).step_bytes())
            assert found == pytest.approx(milliseconds, rel=0.006)


@pytest.mark.parametrize(
    ("k", "round_gb", "length", "token_gb"),
    [(0, 4.52, 1.00, 4.52), (1, 6.00, 1.74, 3.45), (2, 7.45, 2.29, 3.25), (3, 8.89, 2.69, 3.31)],
)
def test_rounds(k: int, round_gb: float, length: float, token_gb: float) -> None:
    emitted = accept_length(0.74, k)
    assert emitted == pytest.approx(length, abs=0.005)
    assert flash().round_bytes(k) == pytest.approx(round_gb * GB, abs=ROUNDED)
    assert flash().bytes_per_token(k, emitted) == pytest.approx(token_gb * GB, abs=ROUNDED)


def test_union_of_experts() -> None:
    assert [round(expected_union(512, 8, n), 1) for n in (1, 2, 3, 4)] == [8, 15.9, 23.6, 31.3]
    assert expected_union(16, 16, 3) == 16


def test_draft_rows_and_state_writes_change_only_their_part() -> None:
    full = flash()
    small = ByteModel(full.shape, head="fp8", draft_rows=32768)
    assert full.draft_bytes() - small.draft_bytes() == (157184 - 32768) * 2564
    assert small.step_bytes(4) == full.step_bytes(4)
    written = ByteModel(full.shape, head="fp8", state_writes="per_token")
    assert written.step_bytes(4) - full.step_bytes(4) == 3 * 35 * 32 * 128 * 128 * 4


def test_every_weight_of_a_real_checkpoint_is_counted() -> None:
    """All experts, the embedding and a BF16 head: together the bytes of the files."""
    shape = model_shape("tiny-ling")
    model = ByteModel(shape, head="bf16", router_bytes=2)
    moe_layers = sum(shape.is_moe(layer) for layer in shape.layers)
    not_weights = ("KDA state", "MLA KV cache", "draft head", "routed experts", "MTP routed experts")
    counted = sum(part.bytes for part in model.parts() + model.draft_parts() if part.name not in not_weights)
    one_expert = {p.name: p.bytes for p in model.draft_parts()}[
        "MTP routed experts"
    ] / shape.num_experts_per_tok
    counted += moe_layers * shape.num_experts * one_expert
    counted += shape.vocab_size * shape.hidden_size * 2 - 2 * (2 * shape.hidden_size)
    stored = sum(header.nbytes for header in read_headers(tiny_ling_path()).values())
    # A_log, dt_bias are stored in FP32 and counted as BF16.
    assert counted == pytest.approx(stored, rel=1e-3)


def test_formats_are_ordered_and_tiny_has_no_draft() -> None:
    sizes = [ByteModel(model_shape("flash", fmt)).step_bytes() for fmt in ("fp4", "fp8", "int4", "bf16")]  # type: ignore[arg-type]
    assert sizes == sorted(sizes)
    with pytest.raises(LingError, match="no MTP layer"):
        ByteModel(model_shape("tiny", "fp8")).round_bytes(1)


def test_command_prints_the_rows_others_read() -> None:
    done = CliRunner().invoke(cli.app, ["roofline", "--model", "flash", "--format", "fp4", "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)["rows"]
    assert {"machine", "k", "accept_length", "bytes_per_token", "ms_per_token"} <= rows[0].keys()
    assert {row["machine"] for row in rows} == set(MACHINES)
    (row,) = [row for row in rows if row["machine"] == "gb10-achievable" and row["k"] == 2]
    assert row["ms_per_token"] == pytest.approx(13.9, abs=0.1)


def test_predictions_stand_beside_measured_rows(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    rows = [
        {"workload": "plain", "context": 128, "ms_per_token": 2.1},
        {"workload": "mtp3@2.68", "context": 4096, "ms_per_token": 1.4},
    ]
    path.write_text(json.dumps({"provenance": {"gpus": ["NVIDIA H200, 143771 MiB, 580"]}, "rows": rows}))
    measured, place = read_results(path)
    assert place is MACHINES["h200"] and (measured[1].k, measured[1].accept_length) == (3, 2.68)
    done = CliRunner().invoke(cli.app, ["roofline", "--results", str(path), "--json"])
    plain = json.loads(done.stdout)["rows"][0]
    assert plain["share_of_floor"] == pytest.approx(plain["ms_per_token"] / 2.1, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nothing-here"], "--model nothing-here"),
        (["--format", "fp3"], "--format fp3"),
        (["--machine", "abacus"], "--machine abacus"),
        (["--k", "0,x"], "--k 0,x"),
        (["--k", "2", "--accept-length", "3.5"], "impossible with k = 2"),
        (["--accept-length", "2"], "--accept-length belongs"),
        (["--acceptance", "1.5"], "--acceptance 1.5"),
        (["--context", "-1"], "context is -1"),
        (["--model", "tiny", "--k", "1"], "no MTP layer"),
        (["--results", "absent.json"], "absent.json: cannot be read"),
    ],
)
def test_errors_name_the_option(words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.app, ["roofline", *words])
    assert isinstance(done.exception, LingError) and message in str(done.exception)


def test_unknown_gpus_match_nothing() -> None:
    assert matching_gpu([]) is None and matching_gpu(["NVIDIA T4, 15 GB"]) is None
    assert matching_gpu(["NVIDIA GB10"]) is machine("gb10-achievable")


def test_measure_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LingError, match="no CUDA device"):
        measure()
