# SPDX-License-Identifier: Apache-2.0
"""Requests of a long run, from a seed: random prompts, some with a long beginning in common, some that are aborted."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ling.eval.studies.seeded_weights import LANES, successor

_SHARED, _ABORTED = 0.3, 0.25
_WATCHED = 8  # one in so many
_PREFIXES = 3
_PROMPT, _ANSWER = (1, 400), (16, 256)


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        abort_after: emitted tokens after which it is aborted; None lets it finish.
        shares: whether the prompt begins like others.
        watched: whether log-probabilities are asked for and checked.
    """

    prompt: list[int]
    max_tokens: int
    abort_after: int | None
    shares: bool
    watched: bool


class Traffic:
    """An endless reproducible stream of requests.

    Args:
        prefix: tokens of a shared beginning; a prefix cache holds whole blocks only, so make it longer than one.
    """

    def __init__(self, vocabulary: int, prefix: int, seed: int) -> None:
        self._vocabulary, self._random = vocabulary, random.Random(seed)
        self._count = 0
        self._prefixes = [self._tokens(prefix) for _ in range(_PREFIXES)]

    def next(self) -> Ask:
        """The next request."""
        chooser = self._random
        shares = chooser.random() < _SHARED
        prompt = (chooser.choice(self._prefixes) if shares else []) + self._tokens(chooser.randint(*_PROMPT))
        max_tokens = chooser.randint(*_ANSWER)
        aborted = chooser.random() < _ABORTED
        after = chooser.randint(1, max_tokens - 1) if aborted else None
        self._count += 1
        return Ask(prompt, max_tokens, after, shares, self._count % _WATCHED == 1)

    def _tokens(self, count: int) -> list[int]:
        # As in text, few tokens are frequent.
        size = self._vocabulary // LANES
        return [
            int(size * self._random.random() ** 3) * LANES + self._random.randrange(LANES)
            for _ in range(count)
        ]


class Budget:
    """Time that a run may take, counted from when this is made.

    Args:
        reserve: seconds at the end that belong to what comes after the traffic.
    """

    def __init__(self, seconds: float, reserve: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = clock() + seconds - reserve, clock

    def spent(self) -> bool:
        """Whether the traffic has to stop."""
        return self._clock() >= self._end


def wrong_tokens(prompt: list[int], answer: list[int], vocabulary: int) -> int:
    """How many tokens of an answer are not the known successor of the one before."""
    last = prompt[-1]
    wrong = 0
    for token in answer:
        wrong += token != successor(last, vocabulary)
        last = token
    return wrong


@dataclass(frozen=True)
class Check:
    """One thing that must hold at the end; `passed` is None where it could not be looked at."""

    name: str
    passed: bool | None
    found: str


MIB = 2**20
MOST_GROWTH = 64 * MIB
# Share of a logit by which a probe's may move: logits are BF16, and either value may round either way. Equal inputs
# in equal batches give equal bits where no kernel adds in the order of arrival.
MOST_DRIFT = 2.0**-6


def memory_checks(before: dict[str, int | None], after: dict[str, int | None]) -> list[Check]:
    """Each counter of GPU memory (bytes) may grow by `MOST_GROWTH`."""
    checks = []
    for name, start in before.items():
        end = after[name]
        if start is None or end is None:
            checks.append(Check(f"memory: {name}", None, "not known on this machine"))
            continue
        found = f"{start / MIB:.0f} MiB before, {(end - start) / MIB:+.1f} MiB after"
        checks.append(Check(f"memory: {name}", end - start <= MOST_GROWTH, found))
    return checks


Answer = tuple[list[int], list[dict[int, float]]]
"""Tokens, and per token the log-probabilities that came with it."""


def probe_check(before: list[Answer], after: list[Answer]) -> Check:
    """The same prompts, asked alone at the start and at the end."""
    tokens = sum(one[0] != other[0] for one, other in zip(before, after, strict=True))
    drifts, lost = [], 0
    for one, other in zip(before, after, strict=True):
        for first, second in zip(one[1], other[1], strict=False):
            lost += first.keys() != second.keys()
            drifts += [
                abs(first[token] - second[token]) / max(abs(first[token]), 1.0)
                for token in first.keys() & second.keys()
            ]
    sound = bool(drifts) and all(drift <= MOST_DRIFT for drift in drifts)  # NaN is no small drift
    worst = max(drifts, key=lambda drift: math.inf if math.isnan(drift) else drift, default=math.nan)
    found = f"{tokens} of {len(before)} answers differ; largest change of {len(drifts)} logits {worst:.2g} of its size"
    found += f"; other candidates at {lost} places"
    return Check("probe unchanged", tokens == 0 and sound, found)
