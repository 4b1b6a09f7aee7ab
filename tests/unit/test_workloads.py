# SPDX-License-Identifier: Apache-2.0
"""What engines of the full-size comparison are asked, and how what they compute is recorded and sorted."""

import pytest
import torch

from vllm_ling.eval.studies.full_size_side import stack
from vllm_ling.eval.studies.taps import Recorder, Step, gather
from vllm_ling.eval.studies.workloads import (
    ANSWER,
    DRAFTED,
    LENGTHS,
    PLAIN,
    REPEATS,
    STOCK,
    Workload,
    drive,
    stale_texts,
    texts,
)

TEXTS = {0: [0, 8, 16, 24, 32], 1: [1, 9, 17]}


def step(tokens: list[int], positions: list[int]) -> Step:
    values = torch.tensor([[float(token)] for token in tokens])
    return Step(torch.tensor(tokens), torch.tensor(positions), {"5": values}, values)


def found(*steps: Step) -> dict[int, list[int]]:
    return {lane: sorted(rows) for lane, rows in gather(steps, TEXTS, 8).items()}


def test_sequences_of_a_batch_are_told_apart() -> None:
    assert found(step([0, 8, 1, 9, 17], [0, 1, 0, 1, 2])) == {0: [0, 1], 1: [0, 1, 2]}
    # The second sequence goes on where the first ends.
    assert found(step([16, 9], [2, 1]), step([24, 17], [3, 2])) == {0: [2, 3], 1: [1, 2]}
    assert found(step([8, 17], [1, 2])) == {0: [1], 1: [2]}


def test_rejected_drafts_and_what_follows_them_are_left_out() -> None:
    assert found(step([8, 16, 40, 32], [1, 2, 3, 4])) == {0: [1, 2], 1: []}
    # A wrong draft of another lane, then a sequence that is right.
    assert found(step([8, 41, 24, 9], [1, 2, 3, 1])) == {0: [1], 1: [1]}


def test_other_requests_and_the_time_after_the_end_are_left_out() -> None:
    assert found(step([4, 12, 8], [1, 2, 1]), step([40], [5])) == {0: [1], 1: []}


def test_later_passes_replace_earlier_ones_and_values_follow_positions() -> None:
    early, late = step([16, 8], [2, 1]), step([16], [2])
    late.taps["5"] += 100
    rows = gather([early, late], TEXTS, 8)[0]
    kept = stack(rows, ("5", "logits"))
    assert kept["positions"].tolist() == [1, 2] and kept["5"].flatten().tolist() == [8, 116]
    early.logits = None
    kept = stack(rows, ("5", "logits"))
    assert kept["logits positions"].tolist() == [2] and len(kept["5"]) == 2


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, 10 * x


class Model(torch.nn.Module):
    """Two layers; `bypass` goes around them as a fused path does."""

    def __init__(self, bypass: bool) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.bypass = bypass
        if bypass:
            self.ling_taps: dict[int, torch.Tensor] | None = None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = input_ids.float().unsqueeze(1)
        if self.bypass:
            if self.ling_taps is not None:
                self.ling_taps |= {0: x, 1: 2 * x}
            return x
        for layer in self.model.layers:
            x, _ = layer(x)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -hidden


@pytest.mark.parametrize("bypass", [False, True])
def test_taps_come_from_layers_or_from_the_path_around_them(bypass: bool) -> None:
    model = Model(bypass)
    recorder, tokens = Recorder(model, (1,)), torch.tensor([3, 4])
    model(input_ids=tokens, positions=tokens)
    tokens.zero_()  # the runner's buffers
    (seen,) = recorder.take()
    assert seen.tokens.tolist() == [3, 4] and seen.fused == bypass and set(seen.taps) == {"1", "final"}
    assert seen.taps["1"].flatten().tolist() == ([6, 8] if bypass else [45, 56])
    assert seen.logits is not None and torch.equal(seen.logits, -seen.taps["final"])
    recorder.stop()
    model(input_ids=tokens, positions=tokens)
    assert recorder.take() == [] and (not bypass or model.ling_taps is None)


class Engine:
    """Emits one token a step for every request."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.left: dict[str, int] = {}
        self.batches: list[set[str]] = []
        self.aborted: list[str] = []

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        assert name not in self.left
        self.running.add(name)
        self.left[name] = max_tokens

    def abort(self, name: str) -> None:
        self.running.discard(name)
        self.aborted.append(name)

    def step(self) -> list[str]:
        self.batches.append(set(self.running))
        for name in list(self.running):
            self.left[name] -= 1
            if not self.left[name]:
                self.running.discard(name)
        return []


@pytest.mark.parametrize("workload", [*PLAIN, *DRAFTED], ids=lambda workload: workload.name)
def test_workloads_end_and_compare_who_finished(workload: Workload) -> None:
    engine = Engine()
    names = drive(workload, engine, texts(512))
    assert sorted(names) == sorted(workload.lanes) and all(engine.left[name] == 0 for name in names.values())
    assert len(engine.aborted) == sum(visit.abort is not None for visit in workload.visits)
    assert all(engine.left[name] > 0 for name in engine.aborted)


def test_reused_slots_see_the_batches_of_the_run_they_are_compared_with() -> None:
    by_name = {workload.name: workload for workload in (*PLAIN, *DRAFTED)}
    for first, reused, again in REPEATS:
        batches = []
        for name in (first, reused, again):
            engine = Engine()
            lanes = {request: lane for lane, request in drive(by_name[name], engine, texts(512)).items()}
            seen = [{lanes[request] for request in batch if request in lanes} for batch in engine.batches]
            batches.append([lanes for lanes in seen if lanes])
            mixed = [batch for batch in engine.batches if batch & lanes.keys() and batch - lanes.keys()]
            assert not mixed
        assert batches[0] == batches[1] == batches[2]
    assert {workload.name for workload in STOCK} <= {workload.name for workload in PLAIN}


def test_stale_texts_have_another_prompt_and_the_same_answer() -> None:
    right, stale = texts(157184), stale_texts(157184)
    for lane, text in stale.items():
        assert len(text) == len(right[lane]) and text[-ANSWER - 1 :] == right[lane][-ANSWER - 1 :]
        assert sum(a != b for a, b in zip(text, right[lane], strict=True)) >= min(LENGTHS[lane] - 1, 4)
