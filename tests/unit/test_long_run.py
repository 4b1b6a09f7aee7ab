# SPDX-License-Identifier: Apache-2.0
"""The long run without an engine: its traffic, its budget, its checks, and the run on an engine that is made up."""

import itertools
import math

import pytest

from vllm_ling.eval.studies import long_run
from vllm_ling.eval.studies.long_run import Counts, Run, checks, engine_settings
from vllm_ling.eval.studies.seeded_weights import continuation
from vllm_ling.eval.studies.traffic import (
    MIB,
    Answer,
    Budget,
    Check,
    Traffic,
    memory_checks,
    probe_check,
    wrong_tokens,
)

VOCABULARY = 512


def test_traffic_repeats_from_its_seed_and_has_every_kind() -> None:
    asks = [
        [traffic.next() for _ in range(400)] for traffic in (Traffic(VOCABULARY, 50, s) for s in (1, 1, 2))
    ]
    assert asks[0] == asks[1] != asks[2]
    first = asks[0]
    assert first[0].watched and 40 < sum(ask.watched for ask in first) < 60
    assert 0.2 < sum(ask.shares for ask in first) / 400 < 0.4
    assert 0.15 < sum(ask.abort_after is not None for ask in first) / 400 < 0.35
    assert all(1 <= ask.abort_after < ask.max_tokens for ask in first if ask.abort_after is not None)
    assert len({tuple(ask.prompt[:50]) for ask in first if ask.shares}) == 3
    assert all(0 <= token < VOCABULARY for ask in first for token in ask.prompt)


def test_budget_leaves_its_reserve() -> None:
    now = [100.0]
    budget = Budget(60, reserve=10, clock=lambda: now[0])
    now[0] = 149.9
    assert not budget.spent()
    now[0] = 150.0
    assert budget.spent()


def test_wrong_tokens_are_counted_once_each() -> None:
    answer = continuation(5, 4, VOCABULARY)
    assert wrong_tokens([9, 5], answer, VOCABULARY) == 0
    assert wrong_tokens([9, 4], answer, VOCABULARY) == 1
    assert wrong_tokens([5], [answer[0], 7, *continuation(7, 2, VOCABULARY)], VOCABULARY) == 1


def test_memory_may_grow_a_little() -> None:
    before = {"allocated": 100 * MIB, "driver": None}
    grown, unknown = memory_checks(before, {"allocated": 164 * MIB, "driver": 5})
    assert grown.passed and unknown.passed is None
    assert memory_checks(before, {"allocated": 165 * MIB, "driver": None})[0].passed is False


def answer(logit: float, token: int = 3, other: int = 9) -> Answer:
    return [token, 4], [{3: logit, other: 1.0}, {4: 8.0}]


def test_the_probe_must_repeat() -> None:
    assert probe_check([answer(8.0)], [answer(8.0)]).passed
    assert probe_check([answer(8.0)], [answer(8.5)]).passed is False
    assert probe_check([answer(8.0)], [answer(8.0, token=5)]).passed is False
    assert probe_check([answer(8.0)], [answer(math.nan)]).passed is False
    assert probe_check([([3], [])], [([3], [])]).passed is False, "nothing was compared"
    assert "at 1 places" in probe_check([answer(8.0)], [answer(8.0, other=10)]).found


def test_every_check_can_fail() -> None:
    good = Counts(tokens=100, finished=5, aborted=2, shared=3, watched=10)
    probe = Check("probe unchanged", True, "")
    assert all(check.passed for check in checks(good, 64, [], probe, {}))
    bad = Counts(tokens=100, finished=5, wrong=1, watched=10, not_finite=1)
    verdicts = {check.name: check.passed for check in checks(bad, 0, [], probe, {"head": "broken"})}
    assert verdicts.pop("probe unchanged") and not any(verdicts.values())
    assert {check.name: check.passed for check in checks(good, None, [], probe, {})}[
        "prefix cache hit"
    ] is None


def test_graphs_are_captured_for_every_number_of_sequences() -> None:
    settings = engine_settings(3, 8, 8192, caching=True, eager=False)
    assert settings["compilation_config"]["cudagraph_capture_sizes"] == [4, 8, 16, 32]
    assert engine_settings(0, 4, 8192, True, eager=False)["compilation_config"][
        "cudagraph_capture_sizes"
    ] == [1, 2, 4]
    assert "compilation_config" not in engine_settings(0, 4, 8192, True, eager=True)


class Requests:
    """Answers as the weights would, one token a step for `slots` requests; breaks after `sound` tokens."""

    def __init__(self, _llm: object, sound: int = 10**9, slots: int = 8) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[dict[int, float]]] = {}
        self.running: set[str] = set()
        self._last: dict[str, int] = {}
        self._asked: dict[str, tuple[int, bool]] = {}
        self._sound, self._slots = sound, slots

    def add(self, name: str, prompt: list[int], max_tokens: int, logprobs: int | None = None) -> None:
        self.running.add(name)
        self.tokens[name], self.logprobs[name] = [], []
        self._last[name], self._asked[name] = prompt[-1], (max_tokens, logprobs is not None)

    def abort(self, name: str) -> None:
        self.running.discard(name)

    def step(self) -> list[str]:
        finished = []
        for name in sorted(self.running)[: self._slots]:
            self._sound -= 1
            (right,) = continuation(self._last[name], 1, VOCABULARY)
            token = right if self._sound > 0 else 7
            self._last[name] = token
            self.tokens[name].append(token)
            most, watched = self._asked[name]
            if watched:
                self.logprobs[name].append({token: 8.0 if self._sound > 0 else math.nan})
            if len(self.tokens[name]) == most:
                self.running.discard(name)
                finished.append(name)
        return finished

    def forget(self, name: str) -> Answer:
        return self.tokens.pop(name), self.logprobs.pop(name)

    def finish(self) -> None:
        while self.running:
            self.step()


class Llm:
    resets = 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def started(monkeypatch: pytest.MonkeyPatch, sound: int = 10**9) -> Run:
    monkeypatch.setattr(long_run, "Requests", lambda llm: Requests(llm, sound))
    return Run(Llm(), VOCABULARY, prefix=40, slots=8, seed=0)


def test_a_run_counts_what_happens_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch)
    before = run.probe()
    run.work(3000, Budget(1000, 0), lambda _: None)
    counts = run.counts
    assert 3000 <= counts.tokens < 3000 + 8 * 256 + 3 * 256 and counts.wrong == counts.not_finite == 0
    assert counts.finished > 5 and counts.aborted > 2 and counts.shared > 2 and counts.watched > 10
    assert not run.requests.running and not run.requests.tokens
    assert probe_check(before, run.probe()).passed
    # A second piece goes on from the first.
    run.work(5000, Budget(1000, 0), lambda _: None)
    assert run.counts.tokens >= 5000


def test_a_run_sees_a_model_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch, sound=2500)
    before = run.probe()
    run.work(4000, Budget(1000, 0), lambda _: None)
    assert run.counts.wrong > 100 and run.counts.not_finite > 0
    assert probe_check(before, run.probe()).passed is False


def test_a_run_ends_when_its_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch)
    ticks = itertools.count()
    run.work(10**9, Budget(50, 0, clock=lambda: next(ticks)), lambda _: None)
    assert 0 < run.counts.tokens < 8 * (50 + 256)
