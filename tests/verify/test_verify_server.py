# SPDX-License-Identifier: Apache-2.0
"""Parts `gsm8k` and `speed` against mock servers: wrong, slow, silent and undrafted ones are told apart."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.mock_servers import serving
from vllm_ling.eval.report.result_file import Item
from vllm_ling.eval.serving.mock_script import Script
from vllm_ling.eval.serving.mock_server import handler
from vllm_ling.eval.serving.served import describe
from vllm_ling.verify import gsm8k, speed
from vllm_ling.verify.finding import Finding
from vllm_ling.verify.settings import Verification

RECORD = {"lm_head": "fp8_online"}
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
QUIET = Console(quiet=True)


def what(**more: Any) -> Verification:
    usual = {"task": "tiny_ling", "items": 10, "max_tokens": 160, "minutes": 0}
    return Verification("tiny-ling", **{**usual, **more})


def ask(script: Script, folder: Path, record: Any = RECORD, **more: Any) -> Finding:
    with serving(handler(script, record=record)) as url:
        return gsm8k.run(what(**more), describe(url), folder, restart=False)


def time_it(script: Script, folder: Path, **more: Any) -> Finding:
    with serving(handler(script, record=RECORD)) as url:
        return speed.run(what(**more), describe(url), folder, QUIET)


def fast(**more: Any) -> Script:
    return Script(**{"ttft_ms": 2, "step_ms": 1, **more})


def test_right_answers(tmp_path: Path) -> None:
    finding = ask(fast(accept=(3,), speculates=True), tmp_path)
    assert finding.outcome == "ok" and "10 of 10 right" in finding.evidence
    assert "accept length 3.0" in finding.evidence and (tmp_path / "gsm8k.json").exists()


def test_wrong_answers(tmp_path: Path) -> None:
    finding = ask(fast(wrong_every=2), tmp_path)
    assert finding.outcome == "fail"
    assert "5 of 10 right: a server that is right 90% of the time gets so few" in finding.evidence
    assert finding.figures["right"] == 5 and finding.figures["p"] < 0.01


def test_a_little_wrong_is_a_warning(tmp_path: Path) -> None:
    finding = ask(fast(wrong_every=3), tmp_path)
    assert finding.outcome == "warn" and "7 of 10 right" in finding.evidence


def test_failed_requests_are_not_wrong_answers(tmp_path: Path) -> None:
    finding = ask(fast(failures={4: "cut", 5: "cut", 6: "cut"}), tmp_path)
    assert finding.outcome == "warn" and "1 requests failed and are not judged" in finding.evidence
    assert finding.figures["answered"] == 9


def test_answers_cut_at_the_budget(tmp_path: Path) -> None:
    finding = ask(fast(), tmp_path, max_tokens=4)
    assert finding.outcome == "fail" and "10 of 10 answers cut at --max-tokens" in finding.evidence


def test_stock_vllm_in_the_plugins_place(tmp_path: Path) -> None:
    finding = ask(fast(), tmp_path, record=None)
    assert finding.outcome == "fail" and "stock vLLM answered" in finding.evidence


def test_questions_that_cannot_be_had_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.load_dataset", _no_network)
    finding = gsm8k.missing_data(what(task="gsm8k"))
    assert finding is not None and finding.outcome == "unknown"
    assert "no questions: gsm8k: lm-eval cannot load its data set" in finding.evidence
    assert "--data FILE" in finding.fix
    assert gsm8k.missing_data(what()) is None


def _no_network(*_: Any, **__: Any) -> Any:
    raise OSError("the hub cannot be reached")


@pytest.mark.parametrize(("right", "items", "p"), [(10, 10, 1.0), (0, 1, 0.1), (9, 10, 1 - 0.9**10)])
def test_chance(right: int, items: int, p: float) -> None:
    assert gsm8k.chance_of_so_few(right, items, 0.9) == pytest.approx(p)


@pytest.mark.clock
def test_sound_speed_with_its_spread(tmp_path: Path) -> None:
    finding = time_it(Script(ttft_ms=5, step_ms=4, accept=(2, 4), speculates=True), tmp_path, serve=MTP)
    assert finding.outcome == "ok", finding.evidence
    assert "too short to judge" in finding.evidence
    assert finding.figures["accept_length"] == pytest.approx(3.0, rel=0.03)
    figures = finding.figures
    assert figures["rounds"] == 3 and len(figures["round_tok_per_s"]) == 3
    assert figures["tok_per_s"] == pytest.approx(750, rel=0.3)
    assert figures["tpot_ms"] == pytest.approx(4 / 3, rel=0.3)
    assert (tmp_path / "speed.json").exists()


def test_a_draft_that_is_noise(tmp_path: Path) -> None:
    finding = time_it(fast(accept=(1,), speculates=True), tmp_path, serve=MTP)
    assert finding.outcome == "fail"
    assert "accept length 1.00 with 3 draft tokens: the draft is noise" in finding.evidence
    assert "doctor --url" in finding.fix


def test_drafts_that_nobody_makes(tmp_path: Path) -> None:
    finding = time_it(fast(), tmp_path, serve=MTP)
    assert (
        finding.outcome == "fail"
        and "3 draft tokens were asked for, but none was counted" in finding.evidence
    )


def test_a_last_position_that_is_never_accepted(tmp_path: Path) -> None:
    finding = time_it(fast(accept=(2, 3), speculates=True), tmp_path, serve=MTP)
    assert finding.outcome == "warn" and "draft position 3 is accepted 0.0%" in finding.evidence


@pytest.mark.parametrize(("expected", "outcome"), [(20, "ok"), (300, "warn"), (900, "fail")])
@pytest.mark.clock
def test_slower_than_expected(tmp_path: Path, expected: float, outcome: str) -> None:
    finding = time_it(Script(ttft_ms=5, step_ms=5), tmp_path, expect_tok_per_s=expected)  # 200 tok/s
    assert finding.outcome == outcome
    if outcome != "ok":
        assert f"where --expect-tok-s says {expected:g}" in finding.evidence and "slow: " in finding.evidence


def test_nothing_answered() -> None:
    items = [Item(id=str(n), correct=None, error="HTTP 500: the engine died") for n in range(4)]
    finding = speed.judge(what(), [items], "items", [])
    assert finding.outcome == "fail" and "nothing could be timed: HTTP 500" in finding.evidence


def rounds(*tok_per_s: float) -> list[list[Item]]:
    """A round of one long answer per speed."""
    return [
        [
            Item(
                id=str(n),
                correct=None,
                output_tokens=1001,
                ttft_s=1.0,
                tpot_ms=1000 / rate,
                latency_s=1 + 1000 / rate,
            )
        ]
        for n, rate in enumerate(tok_per_s)
    ]


def test_unsteady_rounds() -> None:
    steady = speed.judge(what(), rounds(50, 52, 51), "items", [])
    assert steady.outcome == "ok" and "51.0 tok/s (rounds 50.0 to 52.0)" in steady.evidence
    finding = speed.judge(what(), rounds(50, 90, 51), "items", [])
    assert finding.outcome == "warn" and "unsteady: rounds from 50.0 to 90.0 tok/s" in finding.evidence


@pytest.mark.parametrize(("rate", "outcome"), [(40, "ok"), (2, "warn")])
def test_a_known_gpu_is_judged_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rate: float, outcome: str
) -> None:
    from vllm_ling.bench.engine import model_folder

    monkeypatch.setattr(speed, "gpus", lambda: ["NVIDIA GB10, [N/A], 580.95"])
    large = Verification(str(model_folder(tmp_path, "flash", 42)), device="cuda")
    finding = speed.judge(large, rounds(rate, rate, rate), "items", [])
    assert finding.outcome == outcome and "that the bytes allow on gb10-achievable" in finding.evidence
