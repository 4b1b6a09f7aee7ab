# SPDX-License-Identifier: Apache-2.0
"""The streaming client against servers whose speed, token counts and failures are known."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from tests.unit.mock_servers import serving, steadily
from vllm_ling.eval.client import Answer, ask_all
from vllm_ling.eval.mock_script import Script, tokenize
from vllm_ling.eval.mock_server import handler
from vllm_ling.tiny.problems import HELDOUT_PATH

ROWS = [json.loads(line) for line in HELDOUT_PATH.read_text(encoding="utf-8").splitlines()[:8]]


def ask(url: str, rows: list[dict[str, str]], concurrency: int = 1, max_tokens: int = 160) -> list[Answer]:
    """Answers to the rows' questions."""
    questions = [row["question"] for row in rows]
    return asyncio.run(ask_all(url, "tiny-ling", questions, concurrency=concurrency, max_tokens=max_tokens))


@pytest.mark.parametrize(("accept", "mean"), [((1,), 1.0), ((2, 3), 2.5), ((4,), 4.0)])
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


def canned(body: str, status: int = 200) -> type[BaseHTTPRequestHandler]:
    """A handler that always says the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
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
    ("body", "status", "said"),
    [
        ("no such model", 404, "HTTP 404: no such model"),
        (chunk("ab", count=2), 200, "ended before the answer did"),
        ('data: {"error": {"message": "engine died"}}\n\n', 200, "engine died"),
        ("data: {half\n\n", 200, "JSONDecodeError"),
        ("", 200, "ended before the answer did"),
    ],
)
def test_server_errors_are_recorded_not_raised(body: str, status: int, said: str) -> None:
    with serving(canned(body, status)) as url:
        (answer,) = ask(url, ROWS[:1])
    assert answer.error is not None and said in answer.error


def test_a_dead_server_is_recorded() -> None:
    with serving(canned("")) as url:
        pass
    (answer,) = ask(url, ROWS[:1])
    assert answer.error is not None and "ConnectError" in answer.error
