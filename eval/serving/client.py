# SPDX-License-Identifier: Apache-2.0
"""A streaming client that times tokens, not chunks: with MTP one chunk may carry several tokens."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
READ_TIMEOUT_S = 120.0
_PAUSE_S = 0.5  # before the first retry; doubles
_TRY_AGAIN = (408, 425, 429)  # client errors that pass
_BROKEN = ("abort", "error")  # finish reasons of an answer that the server gave up


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        text: what the model said; reasoning that the server split off is not part of it.
        tokens: output tokens as the server counts them (end token and reasoning included).
        first_tokens: how many of them the first non-empty chunk brought.
        ttft_s: request sent to first token.
        decode_s: first token to last token.
        error: transport or server error, None if the answer is complete; the figures are then meaningless.
        chunks: tokens of each chunk in order; None if the server counts only at the end.
        prompt_tokens: as the server counts them, None if it does not say.
        finish: the server's finish reason.
        note: why the server's token counts cannot be right; the text stands, the figures do not.
        tries: requests it took.
        final: whether trying again cannot help.
    """

    text: str = ""
    tokens: int = 0
    first_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    error: str | None = None
    chunks: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    note: str | None = None
    tries: int = 1
    final: bool = False

    @property
    def decoded(self) -> int:
        """Tokens that arrived during `decode_s`: all but those of the first chunk."""
        return self.tokens - self.first_tokens

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first ones; None if there is none."""
        return self.decode_s / self.decoded if self.decoded > 0 else None


class _Events:
    """Splits a stream into the data of its events.

    By line feeds alone: JSON may hold raw line separators such as U+2028, at which text would be split too.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes; comments, other fields and empty lines are left out."""
        self._rest += data
        if b"\n" not in data:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [bytes(line[len(b"data:") :].strip()) for line in lines if line.startswith(b"data:")]


class _Reading:
    """Collects the chunks of one answer with the time of each token."""

    def __init__(self, most: int) -> None:
        self.text, self.tokens, self.first_tokens, self.most = "", 0, 0, most
        self.first_at = self.last_at = 0.0
        self.finish: str | None = None
        self.prompt_tokens: int | None = None
        self.note: str | None = None
        self.pieces = 0
        self.chunks: list[int] = []
        self.counted_late = self.done = False

    def add(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(event)
        if chunk.get("error"):
            raise httpx.RemoteProtocolError(f"server error in the stream: {chunk['error']}")
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        choice = next((choice for choice in choices if not choice.get("index")), {})
        delta = choice.get("delta") or {}
        said = delta.get("content") or choice.get("text") or ""
        piece = said or delta.get("reasoning_content") or delta.get("reasoning") or ""
        usage = chunk.get("usage") or {}
        counted = _count(usage, "completion_tokens") or 0
        prompt = _count(usage, "prompt_tokens")
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        self.text += said
        self.pieces += bool(piece)
        self.finish = choice.get("finish_reason") or self.finish
        if usage and counted < self.tokens:
            self.note = f"usage: the count of output tokens fell from {self.tokens} to {counted}"
        # A count that comes alone after the text, as a total does, is not the time of a token.
        if piece or (counted > self.tokens and (choices or not self.first_at)):
            self.last_at = now
            if not self.first_at:
                self.first_at, self.first_tokens = now, max(counted, 1)
                self.counted_late = not counted
        if counted > self.tokens:
            self.chunks.append(counted - self.tokens)
        self.tokens = max(self.tokens, counted)

    def answer(self, started: float) -> Answer:
        if self.finish in _BROKEN:
            return Answer(
                text=self.text, error=f"the server gave the answer up (finish reason {self.finish})"
            )
        if self.finish is None:
            return Answer(text=self.text, error="the stream ended before the answer did")
        if not self.tokens:
            self.note = "usage: the server did not count the output tokens"
        elif self.tokens > self.most:
            self.note = f"usage: {self.tokens} output tokens counted, {self.most} asked for"
        elif self.tokens < self.pieces and not self.note:
            self.note = f"usage: {self.tokens} output tokens counted in {self.pieces} chunks"
        return Answer(
            text=self.text,
            tokens=self.tokens,
            first_tokens=self.first_tokens,
            ttft_s=self.first_at - started,
            decode_s=self.last_at - self.first_at,
            chunks=None if self.counted_late else tuple(self.chunks),
            prompt_tokens=self.prompt_tokens,
            finish=self.finish,
            note=self.note,
        )


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise ValueError(f"{name} is {value!r}")
    return value


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """One request; errors of transport or server are recorded in the answer, not raised.

    Args:
        path: CHAT or COMPLETIONS.
        body: with `max_tokens`; what streaming needs is added.
    """
    # vLLM then counts tokens in every chunk; a server that ignores the second flag still gives the total.
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**body, "stream": True, "stream_options": options}
    reading, started = _Reading(int(body["max_tokens"])), time.perf_counter()
    error = await _read(client, path, body, reading)
    # What goes wrong after the end of the answer is no matter of the answer.
    if error is None or reading.done:
        return reading.answer(started)
    return replace(error, text=reading.text)


async def _read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], reading: _Reading
) -> Answer | None:
    """Reads the whole answer into `reading`; returns an `Answer` only for its error."""
    limit = client.timeout.read or math.inf
    try:
        async with client.stream("POST", path, json=body) as response:
            if not response.is_success:
                return _refused(response, (await response.aread()).decode(errors="replace"))
            events, heard = _Events(), time.perf_counter()
            async for data in response.aiter_bytes():
                now = time.perf_counter()
                for event in events.feed(data):
                    reading.add(event, now)
                    heard = now
                if now - heard > limit:  # comments that keep a connection alive are no answer
                    raise httpx.ReadTimeout("")
            for event in events.feed(b"\n"):
                reading.add(event, time.perf_counter())
    except httpx.ReadTimeout:
        return Answer(error=f"stalled: nothing came for {limit:g} s")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        return Answer(error=f"malformed event: {type(error).__name__}: {error}")
    except httpx.HTTPError as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    return None


def _refused(response: httpx.Response, detail: str) -> Answer:
    code = response.status_code
    if response.is_redirect:
        detail = f"redirected to {response.headers['location']}; give that address as --url"
    return Answer(error=f"HTTP {code}: {detail[:300]}", final=code < 500 and code not in _TRY_AGAIN)


async def ask_again(
    client: httpx.AsyncClient, path: str, body: Callable[[], dict[str, Any]], retries: int
) -> Answer:
    """`ask`, up to `retries` times more where another try may help; the figures are those of the last try.

    Args:
        body: gives the body of each try.
    """
    answer = await ask(client, path, body())
    for number in range(retries):
        if answer.error is None or answer.final:
            break
        await asyncio.sleep(_PAUSE_S * 2**number)
        answer = replace(await ask(client, path, body()), tries=number + 2)
    return answer


def chat(model: str, question: str, max_tokens: int) -> dict[str, Any]:
    """Body of a greedy chat request."""
    message = {"role": "user", "content": question}
    return {"model": model, "messages": [message], "temperature": 0, "max_tokens": max_tokens}


def connect(base_url: str, concurrency: int, timeout_s: float = READ_TIMEOUT_S) -> httpx.AsyncClient:
    """A client for one server; proxies of the environment are ignored. `timeout_s`: longest silence."""
    limits = httpx.Limits(max_connections=concurrency)
    return httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False)


async def ask_all(
    base_url: str,
    model: str,
    questions: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answers to chat questions in their order, `concurrency` of them under way at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with connect(base_url, concurrency) as client:

        async def one(question: str) -> Answer:
            async with gate:
                answer = await ask(client, CHAT, chat(model, question, max_tokens))
            on_answer()
            return answer

        return list(await asyncio.gather(*map(one, questions)))
