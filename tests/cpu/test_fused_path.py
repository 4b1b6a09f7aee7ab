# SPDX-License-Identifier: Apache-2.0
"""The fused path beside vLLM's layers: which batches it takes, when it is built, and that a failure is final."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_ling.decode import check, fused
from vllm_ling.decode.from_vllm import Unsuitable
from vllm_ling.decode.fused import Built, FusedPath
from vllm_ling.decode.layers import KdaLayer
from vllm_ling.status import STATUS

CPU = torch.device("cpu")


class Situation:
    """What vLLM says about the batch at hand, and what came of building."""

    plans: Any = None
    available = True
    capturing = False
    problem: Exception | None = None
    mode = CUDAGraphMode.NONE
    most = 8
    builds = 0
    pool = 64

    def __init__(self) -> None:
        self.compared: list[int] = []

    def plan(self, **changes: Any) -> None:
        """One plain decode in slot 3."""
        facts: dict[str, Any] = {
            "num_prefills": 0,
            "num_decodes": 1,
            "spec_sequence_masks": None,
            "non_spec_state_indices_tensor": torch.tensor([3], dtype=torch.int32),
        }
        self.plans = {"kda": SimpleNamespace(**facts | changes), "mla": None}

    def drafts(self, tokens: int, **changes: Any) -> None:
        """A verification of `tokens` tokens of one sequence."""
        self.plan(
            **{
                "num_decodes": 0,
                "spec_sequence_masks": torch.ones(1, dtype=torch.bool),
                "spec_state_indices_tensor": torch.arange(1, tokens + 1, dtype=torch.int32)[None],
                "spec_query_start_loc": torch.tensor([0, tokens], dtype=torch.int32),
                "num_accepted_tokens": torch.ones(1, dtype=torch.int32),
            }
            | changes
        )

    def build(self, device: torch.device) -> Built:
        self.builds += 1
        if self.problem is not None:
            raise self.problem
        return Built(fused.FusedBody([], fused.Workspace(8, device)), self.most, self.compare)

    def compare(self, tokens: int, batches: Any) -> dict[str, float]:
        """Needs room in the pool; what is made of its findings is tests/unit/test_fused_check.py's."""
        layer = KdaLayer("kda", *(None,) * 6)  # type: ignore[arg-type]
        states = SimpleNamespace(recurrent=torch.zeros(self.pool, 1))
        object.__setattr__(layer, "states", lambda: states)
        layers: list[Any] = [SimpleNamespace(attention=layer)] if "kda" in batches else []
        with check.redirected([], layers, batches, tokens):
            self.compared.append(tokens)
        return {"all": 0.0}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
    situation = Situation()
    monkeypatch.setattr(fused, "is_forward_context_available", lambda: situation.available)
    monkeypatch.setattr(
        fused,
        "get_forward_context",
        lambda: SimpleNamespace(attn_metadata=situation.plans, cudagraph_runtime_mode=situation.mode),
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: situation.capturing)
    STATUS.choices.clear()
    yield situation
    STATUS.choices.clear()
    STATUS.proofs.clear()


def path(now: Situation, option: str = "auto", kda: Sequence[str] = ("kda",)) -> FusedPath:
    return FusedPath("target", option, now.build, kda)


@pytest.mark.parametrize("available", [True, False])
def test_a_profiling_run_builds_nothing_and_says_nothing(now: Situation, available: bool) -> None:
    now.available = available
    if not available:
        now.plan()  # whatever an earlier step left behind
    assert path(now).take(1, CPU, "") is None
    assert now.builds == 0 and not STATUS.choices


def test_a_decode_builds_once_and_takes_the_path(now: Situation) -> None:
    now.plan()
    ours = path(now)
    first = ours.take(1, CPU, "")
    assert first is not None and first[1]["kda"].slots.tolist() == [3]
    now.plan(non_spec_state_indices_tensor=torch.tensor([5], dtype=torch.int32))
    second = ours.take(1, CPU, "")
    assert second is not None and second[0] is first[0]
    assert second[1]["kda"].slots.tolist() == [5], "the batch is each step's own"
    assert now.builds == 1
    decided = STATUS.choices["target decode"]
    assert decided.choice == "fused" and "ling.decode=auto" in decided.reason


@pytest.mark.parametrize("kda", [("kda",), ()], ids=["target", "draft"])
def test_graphs_of_pieces_go_through_vllm(now: Situation, kda: tuple[str, ...]) -> None:
    """vLLM plans their captures like decodes and replays them for prompts; whole graphs are only for decodes."""
    now.plan()
    ours = path(now, kda=kda)
    now.mode = CUDAGraphMode.PIECEWISE
    assert ours.take(1, CPU, "") is None and now.builds == 0
    now.mode = CUDAGraphMode.FULL
    assert ours.take(1, CPU, "") is not None


def test_breakable_graphs_keep_vllm_s_layers(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_breakable_cudagraph_enabled", lambda: True)
    now.plan()
    assert path(now).take(1, CPU, "") is None and now.builds == 0
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" in STATUS.choices["target decode"].reason


def test_a_verification_takes_the_path(now: Situation) -> None:
    now.drafts(4)
    taken = path(now).take(4, CPU, "")
    assert taken is not None
    batch = taken[1]["kda"]
    assert batch.longest == 4 and batch.starts is not None and batch.starts.tolist() == [0, 4]


def test_every_kda_layer_gets_the_slots_of_its_own_group(now: Situation) -> None:
    """vLLM puts the layers' states into several groups: slot 3 of one is another sequence's in the next."""
    now.plan()
    first = now.plans["kda"]
    now.plan(non_spec_state_indices_tensor=torch.tensor([8], dtype=torch.int32))
    now.plans = {"a": first, "b": now.plans["kda"], "c": first}
    taken = path(now, kda=("a", "b", "c")).take(1, CPU, "")
    assert taken is not None
    assert {name: batch.slots.tolist() for name, batch in taken[1].items()} == {"a": [3], "b": [8], "c": [3]}
    assert taken[1]["a"] is taken[1]["c"], "read once a group"


@pytest.mark.parametrize(
    ("tokens", "plan", "unusual", "reason"),
    [
        (4, {"num_prefills": 1}, "", "a prompt is read"),
        (9, {"num_decodes": 9}, "", "more than 8 tokens"),
        (1, {}, "embeddings come from outside", "embeddings come from outside"),
        (1, {"num_decodes": 0}, "", "no sequence is decoded"),
        (1, {"non_spec_state_indices_tensor": torch.tensor([3])}, "", "an index of the batch is torch.int64"),
    ],
)
def test_other_batches_stay_with_vllm(
    now: Situation, tokens: int, plan: dict[str, Any], unusual: str, reason: str
) -> None:
    now.plan(**plan)
    assert path(now).take(tokens, CPU, unusual) is None
    assert now.builds == 0, "a server that only sees such batches compiles nothing"
    (said,) = STATUS.choices.values()
    assert said.choice == "layers" and reason in said.what


def test_plain_decodes_beside_drafts_stay_with_vllm(now: Situation) -> None:
    now.drafts(4, num_decodes=1)
    assert path(now).take(5, CPU, "") is None and now.builds == 0
    assert [said.what for said in STATUS.choices.values()] == [
        "target path: plain decodes beside verified drafts"
    ]


def test_sequences_longer_than_the_kernels_take_stay_with_vllm(now: Situation) -> None:
    """k of nine with one token each: the batch is small, but a sequence has room for nine."""
    now.drafts(9)
    assert path(now).take(1, CPU, "") is None and now.builds == 0


def test_what_was_built_may_take_fewer_tokens(now: Situation) -> None:
    now.most = 4
    now.drafts(5)
    ours = path(now)
    assert ours.take(5, CPU, "") is None and now.builds == 1
    now.drafts(4)
    assert ours.take(4, CPU, "") is not None and now.builds == 1
    assert {said.what: said.choice for said in STATUS.choices.values()} == {
        "target decode": "fused",
        "target path: more than 4 tokens": "layers",
        "target path: decode and verification of up to 4 tokens": "fused",
    }


def test_nothing_is_built_while_a_graph_is_captured(now: Situation) -> None:
    """Compiling and comparing synchronizes, which a capture forbids; what is there already is captured."""
    now.plan()
    now.capturing = True
    ours = path(now)
    assert ours.take(1, CPU, "") is None and now.builds == 0
    now.capturing = False
    assert ours.take(1, CPU, "") is not None
    now.capturing = True
    assert ours.take(1, CPU, "") is not None and now.builds == 1


@pytest.mark.parametrize(
    ("problem", "reason"),
    [(Unsuitable("MLA rotates by X"), "MLA rotates by X"), (MemoryError("full"), "MemoryError: full")],
)
@pytest.mark.parametrize("option", ["auto", "fused"])
def test_a_failure_is_final_and_said(
    now: Situation, problem: Exception, reason: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(fused, "warning", warnings.append)
    now.problem = problem
    now.plan()
    ours = path(now, option)
    assert ours.take(1, CPU, "") is None
    now.problem = None
    assert ours.take(1, CPU, "") is None and now.builds == 1, "the first reason holds for the process"
    decided = STATUS.choices["target decode"]
    assert (decided.choice, decided.reason) == ("layers", reason)
    assert len(STATUS.choices) == 1
    assert [reason in line for line in warnings] == [True] * (option == "fused")


def test_the_draft_needs_a_plan_but_no_sequences(now: Situation) -> None:
    ours = path(now, kda=())
    assert ours.take(1, CPU, "") is None and now.builds == 0
    now.plans = {"mla": SimpleNamespace()}
    taken = ours.take(8, CPU, "")
    assert taken is not None and taken[1] == {}
    assert ours.take(9, CPU, "") is None


def test_a_plan_without_our_layer_is_a_profiling_run(now: Situation) -> None:
    now.plan()
    assert (
        path(now, kda=("kda", "another")).take(1, CPU, "") is None and now.builds == 0 and not STATUS.choices
    )


def warm_up(now: Situation, ours: FusedPath, tokens: int, planned: bool = True) -> bool:
    """A forward pass of one sequence of `tokens` tokens with room for four; whether it took the path."""
    if not planned:
        now.plans = None
    elif tokens > 4:
        now.plan(num_prefills=1)
    else:
        now.drafts(tokens, spec_state_indices_tensor=torch.zeros(1, 4, dtype=torch.int32))
    return ours.take(tokens, CPU, "") is not None


def pieces(now: Situation, ours: FusedPath, planned: bool) -> list[bool]:
    """vLLM's captures of pieces: each size is warmed up first; the V2 runner plans attention for both, V1 for none."""
    taken = []
    for tokens in (8, 4, 2, 1):
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
            now.mode = mode
            taken.append(warm_up(now, ours, tokens, planned))
    now.mode = CUDAGraphMode.NONE
    return taken


def whole(now: Situation, ours: FusedPath) -> tuple[bool, bool]:
    """The capture of a whole verification: warm-up, then the graph."""
    warm = warm_up(now, ours, 4)
    now.capturing, now.mode = True, CUDAGraphMode.FULL
    captured = warm_up(now, ours, 4)
    now.capturing, now.mode = False, CUDAGraphMode.NONE
    return warm, captured


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_measuring_graphs_on_a_tiny_cache_does_not_use_the_comparison_up(now: Situation, v2: bool) -> None:
    """--max-num-seqs 1 with MTP (k = 3) and the default FULL_AND_PIECEWISE: vLLM first captures on a cache of a block
    per sequence, throws that away, and captures again on the real one."""
    ours = path(now)
    assert not warm_up(now, ours, 8, planned=False), "the profiling run"
    now.pool = 1
    assert not any(pieces(now, ours, v2)) and whole(now, ours) == (False, False) and not now.compared
    assert STATUS.choices["target decode check"].choice == "unknown" and "target_decode" not in STATUS.proofs
    now.pool = 64
    if v2:
        # Steps as in service come before the captures: a prompt, a verification, a decode that drafted nothing.
        assert [warm_up(now, ours, tokens) for tokens in (5, 4, 1)] == [False, True, True]
    pieces(now, ours, v2)
    assert whole(now, ours) == (True, True) and 4 in now.compared and now.builds == 1
    assert STATUS.choices["target decode check"].choice == "ok" and "target_decode" in STATUS.proofs
