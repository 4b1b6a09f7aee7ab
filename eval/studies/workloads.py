# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked in the full-size comparison: which sequences run together, when they come and go."""

import random
from dataclasses import dataclass
from typing import Protocol

from vllm_ling.eval.studies.seeded_weights import LANES, continuation

# Prompt tokens of each lane: less than a KDA chunk, chunk borders, several blocks, one token.
LENGTHS = (5, 64, 193, 700, 1, 33, 128, 17)
ANSWER = 16


@dataclass(frozen=True)
class Visit:
    """One request.

    Attributes:
        lane: which text.
        arrive: the engine step before which it is sent.
        abort: the step before which it is aborted; None lets it finish.
    """

    lane: int
    arrive: int = 0
    abort: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests that share an engine; those that are aborted are not compared."""

    name: str
    visits: tuple[Visit, ...]

    @property
    def lanes(self) -> list[int]:
        """Lanes whose requests finish."""
        return [visit.lane for visit in self.visits if visit.abort is None]


def together(name: str, count: int) -> Workload:
    """The first `count` lanes from the start."""
    return Workload(name, tuple(map(Visit, range(count))))


def _slots(name: str) -> Workload:
    """Four requests aborted midway, then the first two lanes alone, in slots that were used."""
    return Workload(
        name, (*(Visit(lane, abort=5) for lane in range(4, 8)), Visit(0, arrive=6), Visit(1, arrive=6))
    )


# Sequences that our kernels compute from their second token on: no prefill in FP8 has touched their states.
OWN = ("from one token", "from one token, drafts")
PLAIN = (
    *(together(f"decode {count}", count) for count in (1, 2, 3, 4, 8)),
    together("decode 2 again", 2),
    Workload("interleaved", tuple(Visit(lane, arrive=step) for lane, step in enumerate((0, 3, 4, 7)))),
    Workload(OWN[0], (Visit(4),)),
    _slots("slots reused"),
    Workload(
        "slots mixed", (Visit(4), Visit(5), Visit(6, abort=5), Visit(7, abort=5), Visit(0, 5), Visit(1, 5))
    ),
)
DRAFTED = (
    *(together(f"verify {count}", count) for count in (1, 2, 4)),
    together("verify 2 again", 2),
    Workload(OWN[1], (Visit(4),)),
    _slots("slots reused, drafts"),
)
STOCK = (*PLAIN[:5], PLAIN[6])
# Pairs that must give the same bits, each with a repetition that says whether this machine repeats itself at all.
REPEATS = (
    ("decode 2", "slots reused", "decode 2 again"),
    ("verify 2", "slots reused, drafts", "verify 2 again"),
)


def texts(vocabulary: int, seed: int = 0) -> dict[int, list[int]]:
    """Per lane a random prompt of its length and the greedy continuation of `ANSWER` tokens."""
    found = {}
    for lane, length in enumerate(LENGTHS):
        prompt = random_prompt(random.Random(f"{seed} {lane}"), lane, length, vocabulary)
        found[lane] = prompt + continuation(prompt[-1], ANSWER, vocabulary)
    return found


def stale_texts(vocabulary: int) -> dict[int, list[int]]:
    """The same continuations after other prompts: what a state that belongs to another request would give."""
    other = texts(vocabulary, seed=1)
    return {
        lane: other[lane][: LENGTHS[lane] - 1] + text[LENGTHS[lane] - 1 :]
        for lane, text in texts(vocabulary).items()
        if LENGTHS[lane] > 1
    }


def random_prompt(chooser: random.Random, lane: int, length: int, vocabulary: int) -> list[int]:
    """Tokens of one lane."""
    return [chooser.randrange(vocabulary // LANES) * LANES + lane for _ in range(length)]


class Asks(Protocol):
    """What a workload needs of an engine, see `seeded_engine.Requests`."""

    running: set[str]

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None: ...
    def abort(self, name: str) -> None: ...
    def step(self) -> list[str]: ...


def drive(workload: Workload, requests: Asks, lane_texts: dict[int, list[int]]) -> dict[int, str]:
    """Runs a workload to its end; returns the request names of the lanes that are compared."""
    waiting, step = list(workload.visits), 0
    names = {visit: f"{workload.name}/{visit.lane}" for visit in waiting}
    while waiting or requests.running:
        for visit in workload.visits:
            if visit.abort == step and names[visit] in requests.running:
                requests.abort(names[visit])
        for visit in [visit for visit in waiting if visit.arrive == step]:
            waiting.remove(visit)
            prompt = lane_texts[visit.lane][: LENGTHS[visit.lane]]
            requests.add(names[visit], prompt, ANSWER)
        if requests.running:
            requests.step()
        step += 1
    return {visit.lane: name for visit, name in names.items() if visit.abort is None}
