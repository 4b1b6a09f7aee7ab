# SPDX-License-Identifier: Apache-2.0
"""Which batches the fused path takes, as a table; what its layers share; in which order they run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ling.decode.body import FusedBody, FusedLayer
from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import DenseLayer, KdaLayer, MlaLayer, MoELayer, Projection, Workspace
from vllm_ling.decode.policy import BatchFacts, choose_path

ONE = BatchFacts(tokens=1, most=8)


@pytest.mark.parametrize(
    ("facts", "path", "reason"),
    [
        (ONE, "fused", "decode and verification of up to 8 tokens"),
        (replace(ONE, tokens=8, longest=8), "fused", "up to 8 tokens"),
        (replace(ONE, tokens=4, most=4, longest=4), "fused", "up to 4 tokens"),
        (replace(ONE, tokens=9), "layers", "more than 8 tokens"),
        (replace(ONE, tokens=5, most=4), "layers", "more than 4 tokens"),
        (replace(ONE, longest=9), "layers", "more than 8 tokens of a sequence"),
        (replace(ONE, prefills=1), "layers", "a prompt is read"),
        (replace(ONE, mixed=True), "layers", "plain decodes beside verified drafts"),
        (replace(ONE, pieces=True), "layers", "the batch goes through piecewise graphs"),
        (replace(ONE, planned=False), "layers", "profiling runs have no attention plan"),
        (replace(ONE, unusual="embeddings"), "layers", "embeddings"),
        # Of several reasons the first of the kind of batch, not of its size: each kind is logged once.
        (replace(ONE, prefills=1, tokens=900), "layers", "a prompt is read"),
        (replace(ONE, planned=False, tokens=900), "layers", "profiling runs have no attention plan"),
    ],
)
def test_a_path_for_each_kind_of_batch(facts: BatchFacts, path: str, reason: str) -> None:
    found = choose_path(facts)
    assert found[0] == path and found[1].endswith(reason)


def test_a_workspace_gives_the_same_buffer_again() -> None:
    space = Workspace(8, torch.device("cpu"))
    four = space.take("mixed", 4, 16)
    assert four.shape == (4, 16) and four.dtype == torch.bfloat16 and four.is_contiguous()
    assert not four.any(), "rows of padded sequences are never written, and must not hold garbage"
    four.fill_(1)
    eight = space.take("mixed", 8, 16)
    assert eight.data_ptr() == four.data_ptr(), "a graph captured with 4 tokens and one with 8 share it"
    assert eight[:4].eq(1).all() and not eight[4:].any()
    others = (
        space.take("normed", 4, 16),
        space.take("mixed", 4, 32),
        space.take("mixed", 4, 16, torch.float32),
    )
    assert others[2].dtype == torch.float32
    assert len({four.data_ptr(), *(other.data_ptr() for other in others)}) == 4


class Attention:
    """Notes what it is given and adds its number."""

    def __init__(self, number: int, calls: list[Any]) -> None:
        self.__dict__.update(number=number, calls=calls)

    def __call__(self, residual: torch.Tensor, space: Workspace, *batch: Any) -> None:
        number, calls = self.__dict__["number"], self.__dict__["calls"]
        calls.append((number, space, *batch))
        residual.mul_(10).add_(number)


class Kda(Attention, KdaLayer): ...


class Mla(Attention, MlaLayer): ...


class MoE(Attention, MoELayer): ...


class Dense(Attention, DenseLayer): ...


def test_layers_run_in_order_on_one_residual_stream() -> None:
    calls: list[Any] = []
    space = Workspace(8, torch.device("cpu"))
    layers = [FusedLayer(Kda(1, calls), Dense(2, calls)), FusedLayer(Mla(3, calls), MoE(4, calls))]
    body = FusedBody(layers, space)
    batch, positions = {"kda": KdaBatch(torch.ones(1, dtype=torch.int32))}, torch.tensor([7])
    residual = torch.zeros(1, 2, dtype=torch.float64)
    assert body(residual, positions, batch) is residual
    assert residual.tolist() == [[1234, 1234]]
    assert [(call[0], *call[2:]) for call in calls] == [(1, batch), (2,), (3, positions), (4,)]
    assert all(call[1] is space for call in calls)

    body.taps = {}
    body(residual.zero_(), positions, batch)
    assert {n: tap.tolist() for n, tap in body.taps.items()} == {0: [[12, 12]], 1: [[1234, 1234]]}, (
        "copies, which later layers do not change"
    )


def test_a_draft_without_kda_needs_no_sequences() -> None:
    space, calls = Workspace(8, torch.device("cpu")), []
    residual, positions = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0])
    assert FusedBody([FusedLayer(Mla(5, calls), MoE(6, calls))], space)(residual, positions, {})[0, 0] == 56


def test_a_kda_layer_takes_its_own_sequences_and_no_others() -> None:
    """Not even if only another layer's are there: they would be another group's slots."""
    steps: list[Any] = []

    class Silent(Projection):
        def __call__(self, x: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
            return out

    def projection(rows: int) -> Projection:
        gemv: Any = SimpleNamespace(shape=SimpleNamespace(k=4, rows=rows))
        return Silent(gemv, [], [])

    def note(*given: Any) -> None:
        steps.append(given[4])

    step: Any = note
    weights: Any = None
    layer = KdaLayer("b", (torch.ones(2), 1e-6), projection(8), step, weights, lambda: weights, projection(2))
    batches = {name: KdaBatch(torch.tensor([n], dtype=torch.int32)) for n, name in enumerate("abc", 1)}
    residual, space = torch.zeros(1, 2, dtype=torch.bfloat16), Workspace(8, torch.device("cpu"))
    layer(residual, space, batches)
    assert steps == [batches["b"]]
    with pytest.raises(KeyError, match="b"):
        layer(residual, space, {"a": batches["a"]})
