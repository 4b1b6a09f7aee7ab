# SPDX-License-Identifier: Apache-2.0
"""A streaming client that times tokens, not chunks: with MTP one chunk may carry several tokens."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
READ_TIMEOUT_S = 120.0
_PAUSE_S = 0.5  # before the first retry; doubles


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

    def add(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            raise httpx.RemoteProtocolError(f"server error in the stream: {chunk['error']}")
        choice = (chunk.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        said = delta.get("content") or choice.get("text") or ""
        piece = said or delta.get("reasoning_content") or delta.get("reasoning") or ""
        usage = chunk.get("usage") or {}
        counted = usage.get("completion_tokens", 0)
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.text += said
        self.pieces += bool(piece)
        self.finish = choice.get("finish_reason") or self.finish
        if usage and counted < self.tokens:
            self.note = f"usage: the count of output tokens fell from {self.tokens} to {counted}"
        if counted > self.tokens or piece:
            self.last_at = now
            if not self.first_at:
                self.first_at, self.first_tokens = now, max(counted, 1)
        if counted > self.tokens:
            self.chunks.append(counted - self.tokens)
        self.tokens = max(self.tokens, counted)

    def answer(self, started: float) -> Answer:
        if self.finish is None or not self.tokens:
            return Answer(text=self.text, error="the stream ended before the answer did")
        # A server that counts only at the end brings all its tokens in one chunk that comes last.
        counted_late = self.pieces > 1 and len(self.chunks) == 1
        if self.tokens > self.most:
            self.note = f"usage: {self.tokens} output tokens counted, {self.most} asked for"
        elif self.tokens < self.pieces and not self.note:
            self.note = f"usage: {self.tokens} output tokens counted in {self.pieces} chunks"
        return Answer(
            text=self.text,
            tokens=self.tokens,
            first_tokens=self.first_tokens,
            ttft_s=self.first_at - started,
            decode_s=self.last_at - self.first_at,
            chunks=None if counted_late else tuple(self.chunks),
            prompt_tokens=self.prompt_tokens,
            finish=self.finish,
            note=self.note,
        )


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
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.is_error:
                detail = (await response.aread()).decode(errors="replace")[:300]
                return Answer(
                    error=f"HTTP {response.status_code}: {detail}", final=response.status_code // 100 == 4
                )
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    reading.add(json.loads(line[len("data: ") :]), time.perf_counter())
    except httpx.ReadTimeout:
        limit = client.timeout.read or 0.0
        return Answer(text=reading.text, error=f"stalled: nothing came for {limit:g} s")
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        return Answer(text=reading.text, error=f"malformed event: {type(error).__name__}: {error}")
    except httpx.HTTPError as error:
        return Answer(text=reading.text, error=f"{type(error).__name__}: {error}")
    return reading.answer(started)


async def ask_again(client: httpx.AsyncClient, path: str, body: dict[str, Any], retries: int) -> Answer:
    """`ask`, up to `retries` times more where another try may help; the figures are those of the last try."""
    answer = await ask(client, path, body)
    for number in range(retries):
        if answer.error is None or answer.final:
            break
        await asyncio.sleep(_PAUSE_S * 2**number)
        answer = replace(await ask(client, path, body), tries=number + 2)
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
