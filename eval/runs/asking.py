# SPDX-License-Identifier: Apache-2.0
"""Asks a server many requests: what is finished goes into a journal at once, what failed is asked again on resume."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import httpx

from vllm_ling.errors import LingError
from vllm_ling.eval.runs.journal import Journal
from vllm_ling.eval.serving.client import READ_TIMEOUT_S, Answer, ask, ask_again, connect
from vllm_ling.eval.serving.metrics import SpecCounters, parse_counters

_METRICS_S = 10.0
_GONE_AFTER = 5  # failures in a row without any answer between them: the server is gone


@dataclass(frozen=True)
class Request:
    """One item; `digest` tells whether a journal's answer is to this very request."""

    id: str
    body: Mapping[str, Any]
    digest: str


@dataclass(frozen=True)
class Sending:
    """How to ask.

    Attributes:
        timeout_s: longest silence.
        warm_up: requests before the first that counts.
        uncached: no prompt may be answered from the server's prefix cache, whoever asked it before: not the warm-up,
            not an earlier try, not the same workload an hour ago.
    """

    url: str
    path: str
    concurrency: int = 1
    retries: int = 2
    timeout_s: float = READ_TIMEOUT_S
    warm_up: int = 1
    uncached: bool = False


class Watcher(Protocol):
    """Who is told how it goes."""

    def begin(self, total: int, finished: int) -> None:
        """`finished` of `total` items come from an earlier run."""

    def item(self, entry: Mapping[str, Any]) -> None:
        """One more item."""


def ask_items(
    requests: Sequence[Request], sending: Sending, journal: Journal, watcher: Watcher
) -> dict[str, dict[str, Any]]:
    """Entries of all requests by id: `text` and the figures of `result_file.Item`.

    Draft counts are what the server counted since the item before was finished: exact for one request at a time, and
    exact in sum for several.

    Raises:
        LingError: the server stopped answering; what was answered stays in the journal.
    """
    known = {
        request.id
        for request in requests
        if (entry := journal.entries.get(request.id))
        and entry.get("digest") == request.digest
        and not entry.get("error")
    }
    watcher.begin(len(requests), len(known))
    left = [request for request in requests if request.id not in known]
    if left:
        asyncio.run(_Asking(sending, journal, watcher).run(left))
    return {request.id: journal.entries[request.id] for request in requests}


class _Asking:
    """One pass over what is left."""

    def __init__(self, sending: Sending, journal: Journal, watcher: Watcher) -> None:
        self.sending, self.journal, self.watcher = sending, journal, watcher
        self.counters: SpecCounters | None = None
        self.reading = asyncio.Lock()
        self.failed = 0

    async def run(self, requests: Sequence[Request]) -> None:
        how = self.sending
        async with connect(how.url, how.concurrency + 1, how.timeout_s) as client:
            for _ in range(how.warm_up):
                # Short: it is there to load kernels, connections and the prefix that all prompts share.
                await ask(client, how.path, {**self._body(requests[0]), "max_tokens": 8})
            self.counters = await self._read(client)
            queue = iter(requests)
            await asyncio.gather(*(self._work(client, queue) for _ in range(how.concurrency)))

    async def _work(self, client: httpx.AsyncClient, queue: Any) -> None:
        for request in queue:  # shared by the workers; nothing awaits while it advances
            body = partial(self._body, request)
            answer = await ask_again(client, self.sending.path, body, self.sending.retries)
            entry = {**entry_of(request, answer), **await self._drafts(client, answer)}
            self.journal.add(entry)
            self.watcher.item(entry)
            self.failed = self.failed + 1 if answer.error and not answer.final else 0
            if self.failed >= _GONE_AFTER:
                raise LingError(
                    f"{self.failed} requests in a row failed, the last with {answer.error}; answers so far are kept in "
                    f"{self.journal.path}, and the same command goes on from there"
                )

    def _body(self, request: Request) -> dict[str, Any]:
        # vLLM's prefix cache finds a prompt only under the salt it came with.
        return {**request.body, **({"cache_salt": secrets.token_hex(8)} if self.sending.uncached else {})}

    async def _drafts(self, client: httpx.AsyncClient, answer: Answer) -> dict[str, Any]:
        async with self.reading:  # else two items would be given the same drafts
            before, now = self.counters, await self._read(client)
            self.counters = now
        # The counts of failed tries, and of a server that was started anew, are nobody's.
        if before is None or now is None or answer.error or answer.tries > 1:
            return {}
        change = now.since(before)
        if not change.drafts or min(change.drafts, change.accepted, *change.accepted_at) < 0:
            return {}
        return {
            "drafts": int(change.drafts),
            "accepted": int(change.accepted),
            "accepted_at": [int(count) for count in change.accepted_at],
        }

    async def _read(self, client: httpx.AsyncClient) -> SpecCounters | None:
        try:
            page = await client.get("/metrics", timeout=_METRICS_S)
            return parse_counters(page.text) if page.is_success else None
        except (httpx.HTTPError, ValueError):
            return None


def entry_of(request: Request, answer: Answer) -> dict[str, Any]:
    """A journal entry: what the answer says, and its figures where they can be trusted."""
    entry: dict[str, Any] = {"id": request.id, "digest": request.digest, "text": answer.text}
    if answer.error is not None:
        return {**entry, "error": answer.error}
    entry["truncated"] = answer.finish == "length"
    notes = [f"answered at try {answer.tries}"] if answer.tries > 1 else []
    notes += [] if answer.note is None else [answer.note]
    if notes:
        entry["note"] = "; ".join(notes)
    if answer.note is not None:
        return entry
    return {
        **entry,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.tokens,
        "ttft_s": answer.ttft_s,
        "tpot_ms": None if answer.tpot_s is None else 1e3 * answer.tpot_s,
        "latency_s": answer.ttft_s + answer.decode_s,
        "chunks": None if answer.chunks is None else list(answer.chunks),
    }
