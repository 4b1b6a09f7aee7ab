# SPDX-License-Identifier: Apache-2.0
"""The streaming client against servers whose speed, token counts and failures are known."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest

from tests.unit.mock_servers import serving, steadily
from vllm_ling.eval.serving.client import CHAT, Answer, ask_all, chat, connect
from vllm_ling.eval.serving.client import ask as ask_one
from vllm_ling.eval.serving.mock_script import Script, tokenize
from vllm_ling.eval.serving.mock_server import handler
from vllm_ling.tiny.problems import HELDOUT_PATH

ROWS = [json.loads(line) for line in HELDOUT_PATH.read_text(encoding="utf-8").splitlines()[:8]]


def ask(url: str, rows: list[dict[str, str]], concurrency: int = 1, max_tokens: int = 160) -> list[Answer]:
    """Answers to the rows' questions."""
    questions = [row["question"] for row in rows]
    return asyncio.run(ask_all(url, "tiny-ling", questions, concurrency=concurrency, max_tokens=max_tokens))


@pytest.mark.parametrize(("accept", "mean"), [((1,), 1.0), ((2, 3), 2.5), ((4,), 4.0)])
@pytest.mark.clock
def test_time_per_token_is_right_however_tokens_are_chunked(accept: tuple[int, ...], mean: float) -> None:
    steadily(lambda: check_time_per_token(accept, mean))


def check_time_per_token(accept: tuple[int, ...], mean: float) -> None:
    script = Script(ttft_ms=60, step_ms=15, accept=accept, speculates=mean > 1)
    with serving(handler(script)) as url:
        answers = ask(url, ROWS[:3])
    for answer, row in zip(answers, ROWS, strict=False):
        assert answer.error is None
        assert answer.text == row["answer"]
        assert answer.tokens == len(tokenize(row["answer"])) + 1
        assert answer.first_tokens == 1
        assert 0.060 <= answer.ttft_s < 0.090
    decoded, seconds = sum(a.decoded for a in answers), sum(a.decode_s for a in answers)
    # The last step of an answer may be cut short, so the mean is a little below the script's.
    assert seconds / decoded == pytest.approx(0.015 / mean, rel=0.12)


def test_several_tokens_in_the_first_chunk_do_not_count_as_decoded() -> None:
    assert Answer(tokens=9, first_tokens=3, decode_s=0.6).tpot_s == pytest.approx(0.1)
    assert Answer(tokens=1, first_tokens=1).tpot_s is None


def test_answers_keep_the_order_of_the_questions_and_concurrency_is_bounded() -> None:
    active, most, lock = 0, 0, threading.Lock()

    class Counting(handler(Script(ttft_ms=20, step_ms=1))):  # type: ignore[misc]
        def do_POST(self) -> None:
            nonlocal active, most
            with lock:
                active += 1
                most = max(most, active)
            super().do_POST()
            with lock:
                active -= 1

    with serving(Counting) as url:
        answers = ask(url, ROWS, concurrency=3)
    assert [answer.text for answer in answers] == [row["answer"] for row in ROWS]
    assert most == 3


def test_max_tokens_cuts_the_answer() -> None:
    with serving(handler(Script(ttft_ms=1, step_ms=1))) as url:
        (answer,) = ask(url, ROWS[:1], max_tokens=5)
    assert (answer.error, answer.tokens) == (None, 5)


def chunk(content: str = "", *, count: int | None = None, finish: str | None = None) -> str:
    """One server-sent event."""
    usage = {} if count is None else {"usage": {"completion_tokens": count}}
    return (
        "data: "
        + json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}], **usage})
        + "\n\n"
    )


def canned(
    body: str, status: int = 200, headers: dict[str, str] | None = None
) -> type[BaseHTTPRequestHandler]:
    """A handler that always says the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def test_a_server_that_counts_only_at_the_end_is_understood() -> None:
    total = 'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
    with serving(canned(chunk() + chunk("ab") + chunk("c", finish="stop") + total)) as url:
        (answer,) = ask(url, ROWS[:1])
    assert (answer.text, answer.tokens, answer.first_tokens, answer.error) == ("abc", 7, 1, None)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("no such model", 404, "HTTP 404: no such model"),
        (chunk("ab", count=2), 200, "ended before the answer did"),
        ('data: {"error": {"message": "engine died"}}\n\n', 200, "engine died"),
        ("data: {half\n\n", 200, "JSONDecodeError"),
        ("", 200, "ended before the answer did"),
    ],
)
def test_server_errors_are_recorded_not_raised(body: str, status: int, words: str) -> None:
    with serving(canned(body, status)) as url:
        (answer,) = ask(url, ROWS[:1])
    assert answer.error is not None and words in answer.error


def event(**fields: object) -> str:
    """One server-sent event with non-ASCII text as it is, as vLLM sends it."""
    return "data: " + json.dumps(fields, ensure_ascii=False) + "\n\n"


def said(text: str, count: int | None = None, finish: str | None = None, **more: object) -> str:
    """An event with a piece of text."""
    usage = {} if count is None else {"usage": {"completion_tokens": count}}
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **usage, **more)


END = said("", 3, "stop") + "data: [DONE]\n\n"
ODD = {
    "line separators inside the text": said("a\u2028b\x85c\u2029d", 2) + END,
    "no space after data:": (said("a", 1) + said("b", 2) + END).replace("data: ", "data:"),
    "carriage returns": (said("a", 1) + said("b", 2) + END).replace("\n", "\r\n"),
    "comments and other fields": ": alive\n\nevent: x\nid: 7\n" + said("ab", 2) + ": alive\n\n" + END,
    "an error that is none": said("ab", 2, error=None) + END,
    "no end of the last line": (said("ab", 2) + END).removesuffix("\n\n"),
    "a second choice": event(choices=[{"index": 1, "delta": {"content": "other"}}]) + said("ab", 2) + END,
    "a long line": said("ab", 2, padding="x" * 3_000_000) + END,
    "something after the end": said("ab", 2) + END + "data: {half\n\n",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_but_whole_streams_are_understood(name: str) -> None:
    with serving(canned(ODD[name])) as url:
        (answer,) = ask(url, ROWS[:1])
    text = "a\u2028b\x85c\u2029d" if "separators" in name else "ab"
    assert (answer.error, answer.note) == (None, None)
    assert (answer.text, answer.tokens, answer.finish) == (text, 3, "stop")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (said("ab", 2) + said("", 2, "abort"), "gave the answer up (finish reason abort)"),
        (said("ab", 2) + event(choices={"a": 1}), "malformed event"),
        (said("ab", 2) + event(usage={"completion_tokens": 2.5}), "completion_tokens is 2.5"),
        (said("ab", 2) + event(usage={"prompt_tokens": "many"}), "prompt_tokens is 'many'"),
        (said("ab", 2) + event(usage={"prompt_tokens": -1}), "prompt_tokens is -1"),
        (said("ab", 2) + "data: " + "[" * 100_000 + "\n\n", "malformed event"),
    ],
)
def test_what_no_figure_can_come_from_is_an_error(body: str, error: str) -> None:
    with serving(canned(body + "data: [DONE]\n\n")) as url:
        (answer,) = ask(url, ROWS[:1])
    assert answer.error is not None and error in answer.error


def test_an_answer_without_token_counts_stands_without_figures() -> None:
    with serving(canned(said("a") + said("b") + said("", finish="stop") + "data: [DONE]\n\n")) as url:
        (answer,) = ask(url, ROWS[:1])
    assert (answer.text, answer.error) == ("ab", None)
    assert answer.note == "usage: the server did not count the output tokens"


def test_a_total_after_one_piece_is_no_chunk_of_that_many_tokens() -> None:
    """Else the whole answer counts as the first chunk, and nothing is left for the decode speed."""
    with serving(canned(said("abc") + said("", finish="stop") + event(choices=[], usage=TOTAL))) as url:
        (answer,) = ask(url, ROWS[:1])
    assert (answer.tokens, answer.first_tokens, answer.chunks, answer.prompt_tokens) == (7, 1, None, 5)


TOTAL = {"prompt_tokens": 5, "completion_tokens": 7}


@pytest.mark.parametrize(
    ("status", "final", "headers", "words"),
    [
        (307, True, {"Location": "http://elsewhere/"}, "redirected to http://elsewhere/; give that address"),
        (400, True, {}, "HTTP 400"),
        (429, False, {}, "HTTP 429"),
        (503, False, {}, "HTTP 503"),
    ],
)
def test_statuses_are_named_and_tried_again_where_that_may_help(
    status: int, final: bool, headers: dict[str, str], words: str
) -> None:
    with serving(canned("no", status, headers)) as url:
        (answer,) = ask(url, ROWS[:1])
    assert answer.final is final and words in (answer.error or "")


def slow(pieces: list[str], pause_s: float) -> type[BaseHTTPRequestHandler]:
    """A handler that sends pieces with a pause after each."""

    class Handler(canned("")):  # type: ignore[misc]
        def do_POST(self) -> None:
            super().do_POST()
            for piece in pieces:
                self.wfile.write(piece.encode())
                time.sleep(pause_s)

    return Handler


async def ask_patiently(url: str, timeout_s: float) -> Answer:
    async with connect(url, 1, timeout_s) as client:
        return await ask_one(client, CHAT, chat("m", "q", 9))


def test_a_server_that_only_keeps_the_connection_alive_has_stalled() -> None:
    with serving(slow([said("a", 1), *[": alive\n\n"] * 40, END], 0.1)) as url:
        answer = asyncio.run(ask_patiently(url, 1.0))
    assert answer.error == "stalled: nothing came for 1 s" and answer.text == "a"


@pytest.mark.clock
def test_a_total_that_comes_late_is_not_decode_time() -> None:
    late = [said("a"), said("b") + said("", finish="stop"), event(choices=[], usage=TOTAL)]
    with serving(slow(late, 0.4)) as url:
        answer = asyncio.run(ask_patiently(url, 5.0))
    assert answer.tokens == 7 and 0.3 < answer.decode_s < 0.7


def test_a_connection_that_stays_open_after_the_end_spoils_nothing() -> None:
    with serving(slow([said("ab", 2) + END, ""], 2.5)) as url:
        answer = asyncio.run(ask_patiently(url, 1.0))
    assert (answer.error, answer.text, answer.tokens) == (None, "ab", 3)


def test_a_dead_server_is_recorded() -> None:
    with serving(canned("")) as url:
        pass
    (answer,) = ask(url, ROWS[:1])
    assert answer.error is not None and "ConnectError" in answer.error
