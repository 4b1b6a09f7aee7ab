# SPDX-License-Identifier: Apache-2.0
"""Asking many requests: drafts when counters misbehave, prompts that no cache may know, answers that took two tries."""

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.unit.mock_servers import serving
from vllm_ling.eval.runs.asking import Request, Sending, ask_items
from vllm_ling.eval.runs.journal import Journal
from vllm_ling.eval.runs.progress import RunProgress
from vllm_ling.eval.serving.client import COMPLETIONS
from vllm_ling.eval.serving.metrics import ACCEPTED, ACCEPTED_AT, DRAFTS
from vllm_ling.eval.serving.mock_script import Script
from vllm_ling.eval.serving.mock_server import handler

BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}


def answers(
    server: type[BaseHTTPRequestHandler], folder: Path, count: int, **how: Any
) -> list[dict[str, Any]]:
    """Entries of `count` requests."""
    requests = [Request(str(number), BODY, "d") for number in range(count)]
    with (
        serving(server) as url,
        Journal(folder / "j", {}) as journal,
        RunProgress("x") as progress,
    ):
        found = ask_items(requests, Sending(url, COMPLETIONS, **how), journal, progress)
    return [found[str(number)] for number in range(count)]


def counting(pages: Sequence[str]) -> type[BaseHTTPRequestHandler]:
    """The mock, with these pages at /metrics one after another."""
    left = iter(pages)

    class Handler(handler(Script(ttft_ms=1, step_ms=1))):  # type: ignore[misc]
        def do_GET(self) -> None:
            self._reply(200, "text/plain", next(left))

    return Handler


def page(drafts: int, accepted: int) -> str:
    return f'{DRAFTS} {drafts}\n{ACCEPTED} {accepted}\n{ACCEPTED_AT}{{position="0"}} {accepted}\n'


def test_counters_that_fall_or_cannot_be_read_are_nobodys(tmp_path: Path) -> None:
    # Fewer accepted than before although there were more drafts: a new server that has drafted a lot.
    pages = [
        page(10, 30),
        page(20, 50),
        page(25, 7),
        page(30, 9),
        "\x00{" + DRAFTS,
        f"{DRAFTS} NaN\n",
        page(40, 9),
    ]
    found = answers(counting(pages), tmp_path, 6)
    assert [(entry.get("drafts"), entry.get("accepted")) for entry in found] == [
        (10, 20),
        (None, None),
        (5, 2),
        (None, None),
        (None, None),
        (None, None),
    ]
    assert not any("error" in entry for entry in found)


@pytest.mark.parametrize("uncached", [True, False])
def test_every_try_of_an_uncached_prompt_has_a_salt_of_its_own(tmp_path: Path, uncached: bool) -> None:
    """Warm-up, retries and other runs included: a prompt that the server's cache knows has no TTFT of its own."""
    bodies: list[dict[str, Any]] = []

    class Recording(Script):
        def answer(self, body: dict[str, Any]) -> list[str]:
            bodies.append(body)
            return super().answer(body)

    script = Recording(ttft_ms=1, step_ms=1, failures={2: "cut"})
    found = answers(handler(script), tmp_path, 2, uncached=uncached)
    assert [entry.get("note") for entry in found] == ["answered at try 2", None]
    salts = [body["cache_salt"] for body in bodies if "cache_salt" in body]
    assert len(bodies) == 4 and len(set(salts)) == len(salts) == (4 if uncached else 0)


def test_a_note_on_the_counts_does_not_hide_the_tries(tmp_path: Path) -> None:
    script = Script(ttft_ms=1, step_ms=1, failures={2: "drop", 3: "miscount"})
    (entry,) = answers(handler(script), tmp_path, 1)
    assert entry["note"].startswith("answered at try 2; usage: ")
