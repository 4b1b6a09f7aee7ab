# SPDX-License-Identifier: Apache-2.0
"""What the mock server pretends: answers, speed, accept length, and failures by request number."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.runs.questions import read_rows
from vllm_ling.tiny.problems import HELDOUT_PATH

TOKEN_CHARS = 3
FAILURES = ("drop", "http500", "stall", "cut", "garble", "miscount")


@dataclass
class Script:
    """A pretended model and engine. Thread-safe: requests may run side by side.

    Attributes:
        ttft_ms: request to first token.
        step_ms: one engine step.
        accept: tokens per step, repeated in turn over all requests; (1,) is a server without speculation.
        draft_tokens: draft tokens a step, for the counters.
        wrong_every: every n-th question in file order gets a wrong answer; 0: none.
        data: questions with their answers.
        failures: kind of failure by request number, counted from 1.
    """

    ttft_ms: float = 20.0
    step_ms: float = 5.0
    accept: tuple[int, ...] = (1,)
    speculates: bool = False
    wrong_every: int = 0
    draft_tokens: int = 3
    data: Path = HELDOUT_PATH
    failures: dict[int, str] = field(default_factory=dict)
    drafts: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.draft_tokens
        for number, row in enumerate(read_rows(self.data), 1):
            wrong = self.wrong_every and number % self.wrong_every == 0
            self.answers[row["question"]] = "#### -1" if wrong else row["answer"]

    def failure(self) -> str | None:
        """Counts a request and says how it fails."""
        with self.lock:
            self.requests += 1
            return self.failures.get(self.requests)

    def answer(self, body: dict[str, Any]) -> list[str]:
        """The tokens for a chat or completion request; with `ignore_eos` as many as asked for."""
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        if body.get("ignore_eos"):
            return ["abc"] * most
        said = text_of(body["messages"][-1]) if "messages" in body else str(body["prompt"])
        return [*tokenize(self.answers.get(_question(said), "#### 0")), ""][:most]

    def steps(self, tokens: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
        """Tokens of each engine step and whether the answer is complete; the end token has no text."""
        yield list(tokens[:1]), len(tokens) == 1
        done = 1
        for width in itertools.cycle(self.accept):
            if done >= len(tokens):
                return
            if self.speculates:
                with self.lock:
                    self.drafts += 1
                    self.accepted += width - 1
                    for position in range(width - 1):
                        self.accepted_at[position] += 1
            yield list(tokens[done : done + width]), done + width >= len(tokens)
            done += width


def text_of(message: dict[str, Any]) -> str:
    """A chat message's text, whether it is one string or a list of parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def tokenize(text: str) -> list[str]:
    """The mock's tokens: pieces of three characters."""
    return [text[start : start + TOKEN_CHARS] for start in range(0, len(text), TOKEN_CHARS)]


def parse_failures(words: Sequence[str]) -> dict[int, str]:
    """`KIND:N` per word: request number N fails in that way.

    Raises:
        LingError: an unknown kind or not a number.
    """
    found = {}
    for word in words:
        kind, _, number = word.partition(":")
        if kind not in FAILURES or not number.isdecimal():
            raise LingError(f"--fail {word}: expected KIND:NUMBER with KIND one of {', '.join(FAILURES)}")
        found[int(number)] = kind
    return found


def parse_accept(text: str) -> tuple[int, ...]:
    """Tokens per step from a list such as "2,3".

    Raises:
        LingError: not numbers, or a step without a token, which would never end.
    """
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise LingError(f"--accept {text}: expected tokens per step, 1 or more, such as 2,3")
    return tuple(map(int, words))


def _question(said: str) -> str:
    """The last question in a prompt, without the frames that lm-eval's GSM8K tasks put around it."""
    for frame, end in (("Question: ", "\nAnswer:"), ("Q: ", "\nA:")):
        _, found, last = said.rpartition(frame)
        if found and last.endswith(end):
            return last.removesuffix(end)
    return said
