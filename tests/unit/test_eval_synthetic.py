# SPDX-License-Identifier: Apache-2.0
"""The synthetic load: exact lengths, distinct prompts, speed within 2%, random tokens called by their name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.mock_servers import serving, steadily
from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.table import load_of
from vllm_ling.eval.runs.synthetic import Synthetic, make_prompts, measure
from vllm_ling.eval.serving.mock_script import Script
from vllm_ling.eval.serving.mock_server import handler
from vllm_ling.eval.serving.served import describe

RANDOM = Synthetic(None, isl=40, osl=31, requests=2, repeats=3)


@pytest.mark.clock
def test_lengths_speed_and_labels(tmp_path: Path) -> None:
    steadily(lambda: check_lengths_speed_and_labels(tmp_path))


def check_lengths_speed_and_labels(tmp_path: Path) -> None:
    script = Script(ttft_ms=300, step_ms=25, accept=(3,), speculates=True)
    with serving(handler(script)) as url:
        result = measure(RANDOM, describe(url), tmp_path / "s.json", label=None, restart=False)
    s = result.summary
    assert (s.items, s.accuracy, s.transport_errors, s.unmeasured) == (6, None, 0, 0)
    assert {(item.prompt_tokens, item.output_tokens, item.note) for item in result.items} == {(40, 31, None)}
    assert [item.id for item in result.items] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert s.tok_per_s == pytest.approx(120, rel=0.02) and s.ttft_ms == pytest.approx(300, rel=0.02)
    assert s.accept_length == 3.0
    assert "random tokens" in result.provenance["workload"] and "random tokens" in result.provenance["label"]
    load = load_of([result])
    assert load is not None and load.accept_length == 3.0 and load.tokens == 30
    assert load.tpot_s == pytest.approx(1 / 120, rel=0.02)


def test_prompts_differ_and_stay_the_same_from_run_to_run(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{number:06d} " for number in range(2000)))
    with serving(handler(Script())) as url:
        for what in (RANDOM, replace(RANDOM, text=text)):
            prompts = make_prompts(what, describe(url))
            assert len(prompts) == 6 and {len(prompt) for prompt in prompts} == {40}
            assert len({tuple(prompt) for prompt in prompts}) == 6
            assert make_prompts(what, describe(url)) == prompts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"isl": 60_000, "osl": 10_000}, "--isl 60000 and --osl 10000: the server takes 65536"),
        ({"text": "short"}, "--text .*: 7 tokens, but 6 prompts of 40 need 240"),
        ({"text": "missing"}, "--text .*missing"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_asked(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    (tmp_path / "short").write_text("too short a text here")
    if "text" in change:
        change = {"text": tmp_path / change["text"]}
    script = Script()
    with serving(handler(script)) as url, pytest.raises(LingError, match=said):
        measure(replace(RANDOM, **change), describe(url), tmp_path / "s.json", label=None, restart=False)
    assert script.requests == 0


def test_a_server_that_stops_early_is_seen(tmp_path: Path) -> None:
    class Lazy(Script):
        def answer(self, body: dict[str, Any]) -> list[str]:
            return super().answer(body)[:9]

    with serving(handler(Lazy(ttft_ms=1, step_ms=1))) as url:
        result = measure(RANDOM, describe(url), tmp_path / "s.json", label=None, restart=False)
    assert {item.note for item in result.items} == {"output_tokens: 9 instead of 31"}


def test_another_patience_goes_on_with_the_same_run(tmp_path: Path) -> None:
    failing = Script(ttft_ms=1, step_ms=1, failures=dict.fromkeys((4, 5, 6), "http500"))
    with serving(handler(failing)) as url:
        first = measure(RANDOM, describe(url), tmp_path / "s.json", label=None, restart=False)
    well = Script(ttft_ms=1, step_ms=1)
    with serving(handler(well)) as url:
        patient = replace(RANDOM, timeout_s=77.0)
        second = measure(patient, describe(url), tmp_path / "s.json", label=None, restart=False)
    assert (first.summary.transport_errors, second.summary.transport_errors) == (1, 0)
    assert well.requests == 1 + 1 and [item.id for item in second.items] == [item.id for item in first.items]
    assert "timeout_s" not in second.provenance["settings"]


def test_an_odd_length_does_not_hide_the_tries(tmp_path: Path) -> None:
    class Lazy(Script):
        def answer(self, body: dict[str, Any]) -> list[str]:
            return super().answer(body)[:9]

    with serving(handler(Lazy(ttft_ms=1, step_ms=1, failures={2: "drop"}))) as url:
        result = measure(RANDOM, describe(url), tmp_path / "s.json", label=None, restart=False)
    assert result.items[0].note == "answered at try 2; output_tokens: 9 instead of 31"
