# SPDX-License-Identifier: Apache-2.0
"""What the gated worker does with what a model runner returns."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_ling.spec_decode.gated_worker import GatedSteps

OUTPUT = SimpleNamespace(sampled_token_ids=[[5, 6]], req_id_to_index={"a": 0})


class Later(AsyncModelRunnerOutput):
    """As the V2 runner returns it: the tokens are still being copied into an array."""

    sampled_token_ids = "an array that is not there yet"

    def get_output(self) -> Any:
        return OUTPUT


class Runner:
    """Stands in for vLLM's worker."""

    result: Any = OUTPUT

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.result

    def execute_model(self, scheduler_output: Any) -> Any:
        return scheduler_output


class Worker(GatedSteps, Runner):
    pass


class Gate:
    """Notes the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def end(self, emitted: Any) -> None:
        self.calls.append(("end", emitted))

    def rest(self, finished: Any) -> None:
        self.calls.append(("rest", finished))

    def begin(self, *step: Any) -> int:
        self.calls.append(("begin", *step))
        return 2


def worker(result: Any = OUTPUT) -> tuple[Any, Gate]:
    made: Any = Worker()
    made.result, made._gate = result, Gate()
    return made, made._gate


def test_an_output_that_is_still_on_its_way_is_waited_for() -> None:
    made, gate = worker(Later())
    assert made.sample_tokens(None) is OUTPUT
    assert gate.calls == [("end", {"a": [5, 6]})]


def test_without_a_gate_it_is_passed_on() -> None:
    made, _ = worker(Later())
    made._gate = None
    assert isinstance(made.sample_tokens(None), Later)


def test_a_step_without_tokens_is_no_round() -> None:
    made, gate = worker()
    made.execute_model(SimpleNamespace(num_scheduled_tokens={}, finished_req_ids={"a"}))
    step = SimpleNamespace(
        num_scheduled_tokens={"b": 1}, scheduled_spec_decode_tokens={}, finished_req_ids=set()
    )
    assert made.execute_model(step).num_spec_tokens_to_schedule == 2
    assert gate.calls == [("rest", {"a"}), ("begin", {"b": 1}, {}, set())]
