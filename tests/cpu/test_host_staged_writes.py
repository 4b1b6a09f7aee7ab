# SPDX-License-Identifier: Apache-2.0
"""The tables of vLLM's V2 sampler go to the GPU after a new request only, and what is there stays what it was."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.cpu.v2_sampler import REQUESTS, make_sampler
from vllm_ling.host import staged_writes
from vllm_ling.status import STATUS


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STATUS, "choices", {})


def tables(sampler: Any) -> dict[str, torch.Tensor]:
    """What the GPU reads, by name."""
    parts = [sampler.sampling_states, *sampler.logits_processors, sampler.logprob_token_ids_state]
    return {
        f"{type(part).__name__}.{name}": value.gpu.clone()
        for part in parts
        for name, value in vars(part).items()
        if isinstance(getattr(value, "gpu", None), torch.Tensor)
    }


def count_sends(sampler: Any) -> list[int]:
    """How often each real send happened, by counting in the first of the parts."""
    calls: list[int] = []
    send = sampler.sampling_states.apply_staged_writes

    def counted() -> None:
        calls.append(1)
        send()

    sampler.sampling_states.apply_staged_writes = counted
    return calls


def test_the_gpu_reads_the_same_tables_with_fewer_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make_sampler(monkeypatch), make_sampler(monkeypatch)
    staged_writes.keep_sent(ours)
    sends = count_sends(ours)
    arrivals = {2: (0, 0.0), 3: (1, 0.7), 7: (0, 0.3), 8: (3, 0.0)}  # step -> slot, temperature
    for step in range(12):
        if step in arrivals:
            slot, temperature = arrivals[step]
            for sampler in (ours, theirs):
                params = SamplingParams(temperature=temperature, top_k=5 + step, min_p=0.1, seed=step)
                sampler.add_request(slot, params)
        for sampler in (ours, theirs):
            sampler.apply_staged_writes()
        mine, stock = tables(ours), tables(theirs)
        assert mine.keys() == stock.keys() and len(mine) > 10
        assert [name for name in mine if not torch.equal(mine[name], stock[name])] == []
    assert len(sends) == 1 + len(arrivals)  # once at the start, for whatever was staged before
    assert STATUS.choices["sampler tables"].choice == "new requests"


def test_a_send_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(monkeypatch)
    staged_writes.keep_sent(sampler)
    sampler.add_request(0, SamplingParams(temperature=0.5))

    def broken() -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(sampler.sampling_states, "apply_staged_writes", broken)
        with pytest.raises(RuntimeError):
            sampler.apply_staged_writes()
    assert sampler.sampling_states.temperature.gpu[0] == 0.0
    sampler.apply_staged_writes()
    assert sampler.sampling_states.temperature.gpu[0] == 0.5


class Foreign:
    """A logits processor that is not vLLM's."""

    def add_request(self, *_: Any) -> bool:
        return False

    def apply_staged_writes(self) -> None:
        pass


def changed(sampler: Any, case: str) -> Any:
    if case == "its logits processors":
        sampler.logits_processors.append(Foreign())
    elif case == "a trace is replayed":
        sampler.trace_replay_state = SimpleNamespace(apply_staged_writes=lambda: None)
    elif case == "has changed":
        del sampler.thinking_budget_state
    else:
        sampler.__class__ = type("WatermarkSampler", (type(sampler),), {})
    return sampler


@pytest.mark.parametrize(
    "case", ["its logits processors", "a trace is replayed", "has changed", "the sampler is Watermark"]
)
def test_what_may_stage_more_is_sent_in_every_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = changed(make_sampler(monkeypatch), case)
    sends = count_sends(sampler)
    staged_writes.keep_sent(sampler)
    assert "apply_staged_writes" not in vars(sampler) and "add_request" not in vars(sampler)
    choice = STATUS.choices["sampler tables"]
    assert choice.choice == "every step" and case in choice.reason
    if case != "has changed":
        for _ in range(REQUESTS):
            sampler.apply_staged_writes()
        assert len(sends) == REQUESTS


def test_another_sampler_of_the_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    staged_writes.keep_sent(make_sampler(monkeypatch))
    other = make_sampler(monkeypatch)
    sends = count_sends(other)
    other.apply_staged_writes()
    other.apply_staged_writes()
    assert len(sends) == 2
