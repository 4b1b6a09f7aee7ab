# SPDX-License-Identifier: Apache-2.0
"""A streaming chat client that times tokens, not chunks: with MTP one chunk may carry several tokens."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

READ_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        text: what the model said.
        tokens: output tokens as the server counts them (end token included).
        first_tokens: how many of them the first non-empty chunk brought.
        ttft_s: request sent to first token.
        decode_s: first token to last token.
        error: transport or server error, None if the answer is complete; the figures are then meaningless.
    """

    text: str = ""
    tokens: int = 0
    first_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    error: str | None = None

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

    def __init__(self) -> None:
        self.text, self.tokens, self.first_tokens = "", 0, 0
        self.first_at = self.last_at = 0.0
        self.finished = False

    def add(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            raise httpx.RemoteProtocolError(f"server error in the stream: {chunk['error']}")
        choice = (chunk.get("choices") or [{}])[0]
        piece = choice.get("delta", {}).get("content") or ""
        counted = (chunk.get("usage") or {}).get("completion_tokens", 0)
        self.text += piece
        self.finished |= choice.get("finish_reason") is not None
        if counted > self.tokens or piece:
            self.last_at = now
            if not self.first_at:
                self.first_at, self.first_tokens = now, max(counted, 1)
        self.tokens = max(self.tokens, counted)

    def answer(self, started: float) -> Answer:
        if not self.finished or not self.tokens:
            return Answer(text=self.text, error="the stream ended before the answer did")
        return Answer(
            self.text, self.tokens, self.first_tokens, self.first_at - started, self.last_at - self.first_at
        )


async def ask(client: httpx.AsyncClient, model: str, question: str, max_tokens: int) -> Answer:
    """One greedy chat request; errors of transport or server are recorded in the answer, not raised."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        # vLLM then counts tokens in every chunk; a server that ignores the second flag still gives the total.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    reading, started = _Reading(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                detail = (await response.aread()).decode(errors="replace")[:300]
                return Answer(error=f"HTTP {response.status_code}: {detail}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    reading.add(json.loads(line[len("data: ") :]), time.perf_counter())
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        return Answer(text=reading.text, error=f"{type(error).__name__}: {error}")
    return reading.answer(started)


async def ask_all(
    base_url: str,
    model: str,
    questions: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answers in the order of the questions, `concurrency` of them under way at a time."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=READ_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:

        async def one(question: str) -> Answer:
            async with gate:
                answer = await ask(client, model, question, max_tokens)
            on_answer()
            return answer

        return list(await asyncio.gather(*map(one, questions)))
