# SPDX-License-Identifier: Apache-2.0
"""GSM8K through lm-eval against servers that are known: every figure right, every failure named, nothing lost."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.unit.mock_servers import serving, steadily
from vllm_ling.errors import LingError
from vllm_ling.eval.report.result_file import ResultFile, load
from vllm_ling.eval.runs.gsm8k import Gsm8k, evaluate
from vllm_ling.eval.runs.lm_tasks import load_task, task_manager
from vllm_ling.eval.runs.questions import read_rows
from vllm_ling.eval.serving.mock_script import Script, tokenize
from vllm_ling.eval.serving.mock_server import handler
from vllm_ling.eval.serving.served import describe
from vllm_ling.tiny.problems import HELDOUT_PATH

ROWS = read_rows(HELDOUT_PATH)
COT = Gsm8k(task="gsm8k_cot", data=HELDOUT_PATH, limit=12, retries=0, timeout_s=1.0)


def run(what: Gsm8k, out: Path, script: Script, **more: Any) -> ResultFile:
    with serving(handler(script)) as url:
        return evaluate(what, describe(url), out, label=None, restart=more.get("restart", False))


@pytest.mark.clock
def test_every_figure_of_a_40_tok_s_server(tmp_path: Path) -> None:
    """All within 2% of what the script says; the answers are those of the data, every third one wrong."""
    steadily(lambda: check_40_tok_s(tmp_path))


def check_40_tok_s(tmp_path: Path) -> None:
    script = Script(ttft_ms=400, step_ms=25, wrong_every=3)
    result = run(Gsm8k(task="gsm8k_cot", data=HELDOUT_PATH, limit=3), tmp_path / "r.json", script)
    s = result.summary
    assert s.tok_per_s == pytest.approx(40, rel=0.02)
    assert s.tpot_ms == pytest.approx(25, rel=0.02)
    assert s.ttft_ms == pytest.approx(400, rel=0.02)
    assert (s.items, s.accuracy, s.invalid, s.transport_errors) == (3, pytest.approx(2 / 3), 0, 0)
    assert s.accept_length is None and s.acceptance is None
    lengths = [len(tokenize(row["answer"])) + 1 for row in ROWS[:2]]
    assert [item.output_tokens for item in result.items[:2]] == lengths
    assert result.items[0].latency_s == pytest.approx(0.4 + 0.025 * (lengths[0] - 1), rel=0.02)
    assert load(tmp_path / "r.json") == result


def test_accept_length_per_item_and_in_sum(tmp_path: Path) -> None:
    script = Script(ttft_ms=5, step_ms=3, accept=(2, 4, 3), speculates=True, draft_tokens=4)
    result = run(COT, tmp_path / "r.json", script)
    assert result.summary.accept_length == pytest.approx(3.0, rel=0.02)
    acceptance = result.summary.acceptance
    assert acceptance is not None and acceptance[0] == 1.0 and acceptance[3] == 0.0
    assert acceptance[1] == pytest.approx(2 / 3, rel=0.05) and acceptance[2] == pytest.approx(1 / 3, rel=0.1)
    for item in result.items:
        assert item.chunks is not None and sum(item.chunks) == item.output_tokens
        assert item.drafts == len(item.chunks) - 1, "a round per chunk after the first"


def test_several_requests_at_a_time_count_the_same_drafts_in_sum(tmp_path: Path) -> None:
    script = Script(ttft_ms=5, step_ms=2, accept=(2, 3), speculates=True)
    what = Gsm8k(task="gsm8k_cot", data=HELDOUT_PATH, limit=12, concurrency=4)
    result = run(what, tmp_path / "r.json", script)
    warm_up = 1 + 7 // 2 - 1  # 8 tokens: the first, then steps of 2 and 3
    assert sum(item.drafts or 0 for item in result.items) == script.drafts - warm_up
    assert result.summary.accuracy == 1.0


def test_each_failure_is_named_and_no_item_is_lost_or_wrong(tmp_path: Path) -> None:
    # Request 1 is the warm-up, so item N is request N + 2.
    failures = {2: "drop", 4: "http500", 6: "stall", 8: "cut", 10: "garble", 12: "miscount"}
    result = run(COT, tmp_path / "r.json", Script(ttft_ms=2, step_ms=1, failures=failures))
    errors = {item.id: item.error for item in result.items if item.error}
    assert [item.id for item in result.items] == [str(number) for number in range(12)]
    for name, words in {
        "0": "Server disconnected",
        "2": "HTTP 500: the engine died",
        "4": "stalled: nothing came for 1 s",
        "6": "the stream ended before the answer did",
        "8": "malformed event",
    }.items():
        assert words in (errors.pop(name) or ""), name
    assert errors == {}
    assert result.summary.transport_errors == 5 and result.summary.accuracy == 1.0, (
        "not answered is not wrong"
    )
    odd = result.items[10]
    assert odd.correct and odd.output_tokens is None and "usage: " in (odd.note or "")
    assert result.summary.unmeasured == 1


def test_failed_requests_are_tried_again(tmp_path: Path) -> None:
    what = Gsm8k(task="gsm8k_cot", data=HELDOUT_PATH, limit=4, retries=1)
    result = run(what, tmp_path / "r.json", Script(ttft_ms=2, step_ms=1, failures={2: "drop", 4: "http500"}))
    assert result.summary.transport_errors == 0 and result.summary.accuracy == 1.0
    notes = [item.note for item in result.items]
    assert notes == ["answered at try 2", "answered at try 2", None, None]


def test_a_server_that_is_gone_stops_the_run_and_the_next_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    dying = Script(ttft_ms=2, step_ms=1, failures={number: "drop" for number in range(6, 100)})
    with pytest.raises(LingError, match="5 requests in a row failed"):
        run(COT, out, dying)
    assert not out.exists()
    well = Script(ttft_ms=2, step_ms=1)
    result = run(COT, out, well)
    assert result.summary.items == 12 and result.summary.transport_errors == 0
    assert well.requests == 1 + 8, (
        "the four answers of the first run were kept; the failed ones were asked again"
    )
    answers = [json.loads(line) for line in (tmp_path / "r.answers.jsonl").read_text().splitlines()[1:]]
    assert {entry["id"]: entry["text"] for entry in answers if "error" not in entry} == {
        str(number): row["answer"] for number, row in enumerate(ROWS[:12])
    }


def test_an_interrupted_run_with_other_settings_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with pytest.raises(LingError, match="in a row failed"):
        run(COT, out, Script(failures={number: "drop" for number in range(3, 100)}))
    other = Gsm8k(task="gsm8k_cot", data=HELDOUT_PATH, limit=12, max_tokens=99)
    with pytest.raises(LingError, match=r"max_tokens = 4096, now 99"):
        run(other, out, Script(ttft_ms=1, step_ms=1))
    assert run(other, out, Script(ttft_ms=1, step_ms=1), restart=True).summary.items == 12


def test_what_failed_is_asked_again_and_nothing_else(tmp_path: Path) -> None:
    """A run that reached its end with errors is a result, and the same command still mends it."""
    out = tmp_path / "r.json"
    first = run(COT, out, Script(ttft_ms=1, step_ms=1, failures={4: "drop", 9: "cut"}))
    assert (first.summary.items, first.summary.transport_errors) == (12, 2) and out.exists()
    well = Script(ttft_ms=1, step_ms=1)
    second = run(COT, out, well)
    assert well.requests == 1 + 2 and second.summary.transport_errors == 0
    assert [item.id for item in second.items] == [str(number) for number in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.answers.jsonl", "r.json"]


def test_two_halves_of_different_servers_are_not_one_run(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with pytest.raises(LingError, match="in a row failed"):
        run(COT, out, Script(failures={number: "drop" for number in range(3, 100)}))
    with pytest.raises(LingError, match="draft_tokens = 0, now 3"):
        run(COT, out, Script(ttft_ms=1, step_ms=1, speculates=True, accept=(2,)))


def recording(bodies: list[dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    """The mock's handler, which also keeps the request bodies."""
    script = Script(ttft_ms=1, step_ms=1)
    answer = script.answer

    def keep(body: dict[str, Any]) -> list[str]:
        bodies.append(body)
        return answer(body)

    script.answer = keep  # type: ignore[method-assign]
    return handler(script)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_prompts_are_those_of_lm_eval_itself(tmp_path: Path, api: str) -> None:
    """The same task through lm-eval's own model class and through ours: the same messages, stops and limits."""
    import lm_eval
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    what = Gsm8k(task="gsm8k_cot", data=HELDOUT_PATH, limit=3, fewshot=5, chat=api == "chat", max_tokens=256)
    with serving(recording(ours)) as url:
        evaluate(what, describe(url), tmp_path / "r.json", label=None, restart=False)
    with serving(recording(theirs)) as url:
        kind = LocalChatCompletion if api == "chat" else LocalCompletionsAPI
        path = "chat/completions" if api == "chat" else "completions"
        model = kind(
            model="tiny-ling",
            base_url=f"{url}/v1/{path}",
            tokenizer_backend=None,
            tokenized_requests=False,
        )
        lm_eval.simple_evaluate(
            model=model,
            tasks=[load_task("gsm8k_cot", HELDOUT_PATH, None, 5)],
            task_manager=task_manager("gsm8k_cot"),
            limit=3,
            apply_chat_template=api == "chat",
            fewshot_as_multiturn=api == "chat",
            bootstrap_iters=0,
        )
    fields = ("messages", "prompt", "stop", "max_tokens", "temperature", "seed")
    wanted = sorted(json.dumps({f: body.get(f) for f in fields}) for body in theirs)
    found = sorted(json.dumps({f: body.get(f) for f in fields}) for body in ours[1:])  # after the warm-up
    assert found == wanted and len(found) == 3
    if api == "chat":
        assert len(theirs[0]["messages"]) == 11, "five examples as turns, and the question"


def test_examples_come_from_a_file_where_the_task_takes_them_from_one(tmp_path: Path) -> None:
    with pytest.raises(LingError, match="--fewshot-data"):
        load_task("gsm8k", HELDOUT_PATH, None, None)
    bodies: list[dict[str, Any]] = []
    what = Gsm8k(data=HELDOUT_PATH, fewshot_data=HELDOUT_PATH, fewshot=2, limit=2)
    with serving(recording(bodies)) as url:
        result = evaluate(what, describe(url), tmp_path / "r.json", label=None, restart=False)
    assert len(bodies[1]["messages"]) == 5 and result.provenance["lm_eval"]["num_fewshot"] == 2


def test_invalid_and_truncated_answers_are_counted(tmp_path: Path) -> None:
    class Wordy(Script):
        def answer(self, body: dict[str, Any]) -> list[str]:
            first = ROWS[0]["question"] in body["messages"][-1]["content"]
            return ["no ", "idea", ""] if first else super().answer(body)

    some = tmp_path / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    what = Gsm8k(task="gsm8k_cot", data=some, max_tokens=10)
    result = run(what, tmp_path / "r.json", Wordy(ttft_ms=1, step_ms=1, data=some))
    assert result.items[0].invalid and not result.items[0].correct and not result.items[0].truncated
    assert result.items[1].truncated and result.summary.truncated == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "no questions"), ('{"question": "q"}\n', "line 1"), ("{half\n", "line 1"), ("\n[1]\n", "line 2")],
)
def test_bad_data_files_are_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(LingError, match=f"d.jsonl.*{said}"):
        load_task("gsm8k_cot", path, None, None)


def test_thinking_and_sampling_reach_the_server(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    what = Gsm8k(
        task="gsm8k_cot",
        data=HELDOUT_PATH,
        limit=1,
        thinking=False,
        sampling={"temperature": 0.6, "top_p": 0.95},
    )
    with serving(recording(bodies)) as url:
        evaluate(what, describe(url), tmp_path / "r.json", label="x", restart=False)
    assert bodies[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert (bodies[1]["temperature"], bodies[1]["top_p"], bodies[1]["max_tokens"]) == (0.6, 0.95, 4096)
