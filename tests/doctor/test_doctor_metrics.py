# SPDX-License-Identifier: Apache-2.0
"""The exported series: records of several processes, rolling acceptance, and nothing for other models."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from vllm_ling import status
from vllm_ling.metrics.acceptance import AcceptanceWindow
from vllm_ling.metrics.collector import LingCollector, read_records
from vllm_ling.metrics.names import INFO_FACTS


@pytest.fixture
def own_status(monkeypatch: pytest.MonkeyPatch) -> status.Status:
    """A fresh record, so that the tests leave none behind."""
    fresh = status.Status()
    monkeypatch.setattr(status, "STATUS", fresh)
    monkeypatch.setattr("vllm_ling.metrics.collector.STATUS", fresh)
    return fresh


def test_a_child_process_keeps_its_record_in_the_folder(
    tmp_path: Path, own_status: status.Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(status.SHARED_FOLDER, str(tmp_path))
    status.choose("lm_head", "fp8_online", "auto")
    status.proof("head_probe", "fine")
    status.fault("draft_head_nan", "NaN")
    (path,) = tmp_path.iterdir()
    assert path.name == f"{os.getpid()}.json"
    record = json.loads(path.read_text())["record"]
    assert record["choices"]["lm_head"]["reason"] == "auto"
    assert list(record["faults"]) == ["draft_head_nan"]


def test_without_a_folder_or_with_one_that_is_gone_nothing_happens(
    tmp_path: Path, own_status: status.Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(status.SHARED_FOLDER, raising=False)
    status.choose("a", "b", "c")
    monkeypatch.setenv(status.SHARED_FOLDER, str(tmp_path / "gone"))
    status.choose("d", "e", "f")
    assert status.shared_folder() == tmp_path / "gone"


def test_workers_of_the_same_name_all_count(tmp_path: Path, own_status: status.Status) -> None:
    for pid, process in ((11, "VllmWorker-0"), (12, "VllmWorker-1"), (13, "VllmWorker-0")):
        record = {"process": process, "record": {"state": "active", "reason": str(pid)}}
        (tmp_path / f"{pid}.json").write_text(json.dumps(record))
    found = {name: record["reason"] for name, record in read_records(tmp_path).items() if name != "APIServer"}
    assert found == {"VllmWorker-0": "11", "VllmWorker-1": "12", "VllmWorker-0 13": "13"}


def test_damaged_records_are_skipped(tmp_path: Path, own_status: status.Status) -> None:
    for name, text in (
        ("1", "{"),
        ("2", "[]"),
        ("3", '{"process": "x"}'),
        ("4", '{"process": "W", "record": {}}'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    assert set(read_records(tmp_path)) == {"APIServer", "W"}
    assert set(read_records(None)) == {"APIServer"}


def test_reasons_with_quotes_and_newlines_stay_one_line(tmp_path: Path, own_status: status.Status) -> None:
    own_status.faults["x"] = 'a "quoted"\n\x1b[31mtext'
    registry = CollectorRegistry()
    registry.register(LingCollector(None, dict.fromkeys(INFO_FACTS, "x"), None))
    page = generate_latest(registry).decode()
    assert 'message="a \\"quoted\\" ?[31mtext"' in page
    assert "ling:faults 1.0" in page


def test_acceptance_forgets() -> None:
    now = [0.0]
    window = AcceptanceWindow(60, lambda: now[0])
    assert window.accept_length() is None
    window.add(10, 30)
    now[0] = 0.5
    window.add(10, 10)
    assert window.accept_length() == 3.0
    now[0] = 59.0
    window.add(10, 0)
    assert window.accept_length() == pytest.approx(1 + 40 / 30)
    now[0] = 61.0
    assert window.accept_length() == 1.0
    now[0] = 200.0
    assert window.accept_length() is None


def test_several_api_servers_share_the_record_as_gauges(own_status: status.Status) -> None:
    from vllm_ling.metrics.stat_logger import freeze

    own_status.state = "active"
    own_status.faults["x"] = "y"
    registry = CollectorRegistry()
    freeze(LingCollector(None, dict.fromkeys(INFO_FACTS, "x"), None), registry)
    page = generate_latest(registry).decode()
    assert 'ling:fault{code="x",message="y",process="APIServer"} 1.0' in page
    assert 'state="active"' in page
    assert "ling:faults 1.0" in page


def config(architecture: str) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architectures=[architecture], model="m", quantization="ling", enforce_eager=False
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[1, 2]
        ),
        kernel_config=SimpleNamespace(moe_backend="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, method="mtp"),
        additional_config={},
    )


def page() -> str:
    return generate_latest(REGISTRY).decode()


def test_the_stat_logger_serves_ling_models_only(own_status: status.Status) -> None:
    from vllm_ling.metrics.stat_logger import LingStatLogger

    other = LingStatLogger(config("LlamaForCausalLM"))
    other.record(None, None)
    other.record_sleep_state(0, 2)
    assert "ling:config" not in page()
    broken = LingStatLogger(SimpleNamespace(model_config=None))
    broken.log_engine_initialized()
    logger = LingStatLogger(config("BailingMoeV3ForCausalLM"))
    again = LingStatLogger(config("BailingMoeV3ForCausalLM"))  # a second engine replaces the first
    try:
        again.record(
            SimpleNamespace(
                spec_decoding_stats=SimpleNamespace(
                    num_drafts=2,
                    num_accepted_tokens=3,
                    num_accepted_tokens_per_pos=[2, 1, 0],
                    num_draft_tokens_per_pos=[2, 2, 2],
                )
            ),
            None,
        )
        again.record(SimpleNamespace(spec_decoding_stats=None), None)
        again.record_sleep_state(0, 2)
        again.record_sleep_state(1, 0)
        assert "ling:accept_length 2.5" in page()
        assert "ling:level_2_sleeps_total 1.0" in page()
        assert 'cudagraph_mode="FULL"' in page()
    finally:
        REGISTRY.unregister(again._collector)
    assert logger._collector is not again._collector


def test_broken_drafts_raise_one_alarm_while_serving(
    own_status: status.Status, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ling.metrics.stat_logger import LingStatLogger

    monkeypatch.setattr(status._logger, "propagate", True)
    monkeypatch.setattr(status._logger.parent, "propagate", True)
    logger = LingStatLogger(config("BailingMoeV3ForCausalLM"))
    try:
        for per_position in [[3, 2, 1]] * 50 + [[0, 0, 0]] * 100:
            stats = SimpleNamespace(
                num_drafts=4,
                num_accepted_tokens=sum(per_position),
                num_accepted_tokens_per_pos=per_position,
                num_draft_tokens_per_pos=[4, 4, 4],
            )
            logger.record(SimpleNamespace(spec_decoding_stats=stats), None)
        text = page()
        assert 'ling:draft_alarm{alarm="draft_chance"} 1.0' in text
        assert 'ling:draft_alarm{alarm="draft_tail"} 0.0' in text and 'ling:acceptance{position="3"}' in text
        broken = SimpleNamespace(num_drafts=1, num_accepted_tokens=0, num_accepted_tokens_per_pos=None)
        for _ in range(2):
            logger.record(SimpleNamespace(spec_decoding_stats=broken), None)
    finally:
        REGISTRY.unregister(logger._collector)
    lines = [record.message for record in caplog.records if "ALARM" in record.message]
    assert len(lines) == 1 and "draft_chance: drafts are noise" in lines[0]
    assert sum("no longer watched" in record.message for record in caplog.records) == 1
    assert own_status.faults == {}, "the record is about the loaded model"


def test_the_backend_of_vllms_method_is_recorded(own_status: status.Status) -> None:
    from vllm_ling.quant.moe import _record_backend

    _record_backend(SimpleNamespace())
    assert own_status.choices == {}
    _record_backend(SimpleNamespace(mxfp4_backend=SimpleNamespace(value="HUMMING")))
    assert own_status.choices["moe backend"].choice == "HUMMING"
