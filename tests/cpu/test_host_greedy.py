# SPDX-License-Identifier: Apache-2.0
"""Greedy batches take the head's best rows; their tokens are those of vLLM's sampler, and other batches are vLLM's."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.cpu.v2_sampler import make_sampler
from vllm_ling.host import greedy
from vllm_ling.models.ling import LingForCausalLM
from vllm_ling.status import STATUS

WHAT = "greedy sampling"


def in_triton(*arguments: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.cpu.greedy_in_triton", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
def test_tokens_and_counts_are_those_of_vllms_kernels() -> None:
    found = in_triton()
    assert found["different"] == [] and found["wrongly"] == []
    assert found["ours"] > 60 and found["vllm"] > 20 and found["accepted"] > 100


@pytest.mark.slow
def test_a_head_that_takes_the_wrong_row_is_found() -> None:
    assert in_triton("wrong")["different"]


class Head:
    """A model whose best tokens are given."""

    def __init__(self, best: list[int] | None) -> None:
        self.best = None if best is None else torch.tensor(best)

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        assert self.best is None or len(self.best) == len(hidden)
        return self.best


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GPUModelRunner.sample` notes that vLLM was asked."""
    monkeypatch.setattr(STATUS, "choices", {})
    sample: Any = lambda self, hidden_states, input_batch, grammar_output: "vLLM"  # noqa: E731
    monkeypatch.setattr(GPUModelRunner, "sample", sample)


def make_runner(monkeypatch: pytest.MonkeyPatch, best: list[int] | None, *requests: dict[str, Any]) -> Any:
    sampler, model = make_sampler(monkeypatch), Head(best)
    greedy.install(model, sampler)
    for slot, settings in enumerate(requests):
        sampler.add_request(slot, SamplingParams(**settings))
    fields = {"__module__": "vllm.x", "watermark_key": None, "synthetic_conditional_rates": None}
    rejection = type("RejectionSampler", (), fields)()
    return SimpleNamespace(
        model=model,
        sampler=sampler,
        batch_sharder=None,
        pp_handler=None,
        adaptive_verification=None,
        rejection_sampler=rejection,
        speculator=SimpleNamespace(draft_logits=None),
        speculative_config=SimpleNamespace(rejection_sample_method="standard"),
    )


def make_batch(count: int, drafts: int = 0, **changes: Any) -> Any:
    each = drafts + 1
    fields = {
        "num_reqs": count,
        "num_tokens": count * each,
        "has_prefill": False,
        "idx_mapping_np": np.arange(count),
        "num_scheduled_tokens": np.full(count, each),
        "num_draft_tokens": count * drafts,
        "num_draft_tokens_per_req": np.full(count, drafts) if drafts else None,
        "input_ids": torch.arange(count * each + 3, dtype=torch.int32),
    }
    return SimpleNamespace(**(fields | changes))


def sample(runner: Any, batch: Any, grammar: Any = None) -> Any:
    function: Any = GPUModelRunner.sample
    return function(runner, torch.zeros(16, 4), batch, grammar)


GREEDY = {"temperature": 0}


def test_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, [7, 9], GREEDY, GREEDY)
    output, number, rejected = sample(runner, make_batch(2))
    assert output.sampled_token_ids.tolist() == [[7], [9]]
    assert number.tolist() == [1, 1] and rejected.tolist() == [0, 0]
    assert STATUS.choices[WHAT].choice == "best rows"


def test_verified_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    # The drafts are 1, 2, 3 and 5, 6, 7.
    runner = make_runner(monkeypatch, [1, 2, 0, 8, 5, 6, 7, 8], GREEDY, GREEDY)
    output, number, rejected = sample(runner, make_batch(2, 3))
    assert output.sampled_token_ids.tolist() == [[1, 2, 0, 8], [5, 6, 7, 8]]
    assert number.tolist() == [3, 4] and rejected.tolist() == [1, 0]
    assert number.dtype == rejected.dtype == torch.int32


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 0, "logprobs": 0},
        {"temperature": 0, "logprob_token_ids": [3]},
        {"temperature": 0, "presence_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0, "logit_bias": {3: 1.0}},
        {"temperature": 0, "allowed_token_ids": [3, 4]},
        {"temperature": 0, "min_tokens": 2, "stop_token_ids": [3]},
    ],
    ids=str,
)
def test_one_request_that_asks_for_more_leaves_the_batch_to_vllm(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(monkeypatch, [7, 9], GREEDY, settings)
    assert sample(runner, make_batch(2)) == "vLLM"
    runner.model.best = torch.tensor([7])
    assert sample(runner, make_batch(1))[1].tolist() == [1], "the other one alone is plain"
    runner.sampler.add_request(1, SamplingParams(**GREEDY))
    runner.model.best = torch.tensor([7, 9])
    assert sample(runner, make_batch(2))[1].tolist() == [1, 1], "its slot has another request now"


def test_a_slot_whose_request_failed_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, [7], GREEDY)
    with pytest.raises(AttributeError):
        runner.sampler.add_request(0, None)
    assert sample(runner, make_batch(1)) == "vLLM"


@pytest.mark.parametrize(
    "changes",
    [
        {"has_prefill": True},
        {"num_scheduled_tokens": np.array([1, 3]), "num_tokens": 4},
        {"num_draft_tokens": 1, "num_draft_tokens_per_req": np.array([1, 0])},
        {"num_reqs": 0},
    ],
    ids=str,
)
def test_batches_of_another_shape_are_vllms(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, None, GREEDY, GREEDY)
    runner.model.best_tokens = None  # must not be asked
    assert sample(runner, make_batch(2, **changes)) == "vLLM"


def test_ragged_drafts_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, None, GREEDY, GREEDY)
    runner.model.best_tokens = None
    ragged = {"num_draft_tokens_per_req": np.array([1, 3]), "num_draft_tokens": 4}
    assert sample(runner, make_batch(2, 2, **ragged)) == "vLLM"


@pytest.mark.parametrize("who", ["batch_sharder", "pp_handler", "adaptive_verification"])
def test_others_that_take_part_keep_vllms_way(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, [7], GREEDY)
    setattr(runner, who, object())
    assert sample(runner, make_batch(1)) == "vLLM"


def test_a_grammar_and_a_head_without_the_kernel_keep_vllms_way(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, [7], GREEDY)
    assert sample(runner, make_batch(1), grammar=object()) == "vLLM"
    runner.model.best = None
    assert sample(runner, make_batch(1)) == "vLLM"


def synthetic_runner(
    monkeypatch: pytest.MonkeyPatch, best: list[int], requests: int, rates: list[float]
) -> Any:
    runner = make_runner(monkeypatch, best, *[GREEDY] * requests)
    runner.speculative_config.rejection_sample_method = "synthetic"
    runner.rejection_sampler.synthetic_conditional_rates = torch.tensor(rates)
    return runner


def test_synthetic_acceptance_takes_the_drafts_up_to_the_first_that_has_no_luck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The drafts are 1, 2, 3 and 5, 6, 7; the head agrees with none.
    runner = synthetic_runner(monkeypatch, [90, 91, 92, 93, 94, 95, 96, 97], 2, [1.0, 1.0, 0.0])
    output, number, rejected = sample(runner, make_batch(2, 3))
    assert output.sampled_token_ids[:, :3].tolist() == [[1, 2, 92], [5, 6, 96]]
    assert number.tolist() == [3, 3] and rejected.tolist() == [1, 1]
    assert output.sampled_token_ids.dtype == torch.int64 and number.dtype == torch.int32
    runner.rejection_sampler.synthetic_conditional_rates = torch.ones(3)
    assert sample(runner, make_batch(2, 3))[0].sampled_token_ids.tolist() == [[1, 2, 3, 93], [5, 6, 7, 97]]
    assert STATUS.choices["greedy verification"].choice == "best rows"


def test_synthetic_acceptance_has_the_rates_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    runner = synthetic_runner(monkeypatch, [90, 91, 92], 1, [0.8, 0.25])
    lengths = [int(sample(runner, make_batch(1, 2))[1]) for _ in range(2000)]
    # 0.8 + 0.8 * 0.25 drafts a round; one standard deviation of the mean is 0.014.
    assert abs(sum(lengths) / len(lengths) - 2.0) < 0.06
    assert 330 < lengths.count(1) < 470  # a fifth of 2,000, give or take four standard deviations


@pytest.mark.parametrize("case", ["block", "watermark", "logits", "Other", "no speculator", "rates"])
def test_drafts_judged_in_another_way_are_vllms(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, [1, 2], GREEDY)
    if case == "block":
        runner.speculative_config.rejection_sample_method = case
    elif case == "watermark":
        runner.rejection_sampler.watermark_key = 3
    elif case == "logits":
        runner.speculator.draft_logits = object()
    elif case == "rates":
        fields = {"__module__": "vllm.x", "watermark_key": None}
        runner.rejection_sampler = type("RejectionSampler", (), fields)()
    elif case == "Other":
        runner.rejection_sampler = type(case, (), {})()
    else:
        runner.speculator = None
    assert sample(runner, make_batch(1, 1)) == "vLLM"
    assert STATUS.choices["greedy verification"].choice == "vLLM's"
    runner.model.best = torch.tensor([7])
    assert sample(runner, make_batch(1))[0].sampled_token_ids.tolist() == [[7]], "without drafts it is plain"


def test_another_model_is_sampled_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, [7], GREEDY)
    runner.model = SimpleNamespace()
    assert sample(runner, make_batch(1)) == "vLLM"


@pytest.mark.parametrize("case", ["NaNs", "masks", "trace", "Watermark", "has changed", "GPUModelRunner"])
def test_what_it_does_not_know_it_leaves_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(monkeypatch)
    if case == "NaNs":
        sampler.compute_nans = True
    elif case == "masks":
        sampler.return_sampling_mask = True
    elif case == "trace":
        sampler.trace_replay_state = object()
    elif case == "Watermark":
        sampler.__class__ = type("WatermarkSampler", (type(sampler),), {})
    elif case == "has changed":
        del sampler.needs_logits_processing
    else:
        monkeypatch.setattr(GPUModelRunner, "sample", lambda self, hidden_states: None)
    before, model = GPUModelRunner.sample, SimpleNamespace()
    greedy.install(model, sampler)
    assert GPUModelRunner.sample is before and vars(model) == {} and "add_request" not in vars(sampler)
    assert STATUS.choices[WHAT].choice == "vLLM's" and case in STATUS.choices[WHAT].reason


def test_the_runner_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make_runner(monkeypatch, None)
    once = GPUModelRunner.sample
    make_runner(monkeypatch, None)
    assert GPUModelRunner.sample is once


@pytest.mark.parametrize(
    ("changes", "most", "rows", "asked"),
    [
        ({}, 8, 8, True),
        ({}, 8, 9, False),
        ({}, 0, 1, False),
        ({"scale": 2.0}, 8, 1, False),
        ({"soft_cap": 30.0}, 8, 1, False),
        ({"logits_as_input": True}, 8, 1, False),
    ],
)
def test_the_model_asks_its_head_where_that_is_the_same(
    changes: dict[str, Any], most: int, rows: int, asked: bool
) -> None:
    model = LingForCausalLM.__new__(LingForCausalLM)
    torch.nn.Module.__init__(model)
    processor = {"scale": 1.0, "soft_cap": None, "logits_as_input": False} | changes
    method = SimpleNamespace(most_best_rows=most, best_rows=lambda head, x: (head, len(x)))
    model.logits_processor = SimpleNamespace(**processor)
    model.lm_head = SimpleNamespace(quant_method=method)
    assert model.best_tokens(torch.zeros(rows, 4)) == ((model.lm_head, rows) if asked else None)
    del method.most_best_rows  # a head of another kind
    assert model.best_tokens(torch.zeros(rows, 4)) is None
