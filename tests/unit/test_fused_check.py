# SPDX-License-Identifier: Apache-2.0
"""What the comparison at load makes of what it finds; `tests/cpu/test_fused_wiring.py` runs it in an engine."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ling.decode import check, fused
from vllm_ling.decode.check import BOUND, Inconclusive, NotChecked, away
from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import KdaLayer
from vllm_ling.decode.policy import BatchFacts
from vllm_ling.status import STATUS, Status

SOUND = {"layer 0 attention": 0.01, "layer 0 mlp": 0.02}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Status:
    fresh = Status()
    for name in vars(fresh):
        monkeypatch.setattr(STATUS, name, getattr(fresh, name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused, "is_breakable_cudagraph_enabled", lambda: False)
    return STATUS


def path(*answers: Any, option: str = "auto") -> tuple[Any, list[int]]:
    """A path whose comparisons give `answers` one after another, and the calls so far."""
    calls: list[int] = []

    def compare(tokens: int, batches: Any) -> dict[str, float]:
        answer = answers[min(len(calls), len(answers) - 1)]
        calls.append(tokens)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    built: Any = fused.Built(SimpleNamespace(), 8, compare)  # type: ignore[arg-type]
    made = fused.FusedPath("target", option, lambda device: built)
    made._facts = lambda tokens, unusual: (BatchFacts(tokens, 8), {})  # type: ignore[method-assign]
    return made, calls


def taken(made: Any) -> bool:
    return made.take(2, torch.device("cpu"), "") is not None


def test_agreement_is_a_proof_and_is_asked_once(record: Status) -> None:
    made, calls = path(SOUND)
    assert taken(made) and taken(made) and calls == [2]
    assert (
        "2 parts agree" in record.proofs["target_decode"] and "layer 0 mlp" in record.proofs["target_decode"]
    )
    assert record.choices["target decode"].choice == "fused" and not record.faults


@pytest.mark.parametrize("distance", [1.1 * BOUND, math.nan, math.inf])
def test_disagreement_is_a_fault_and_leaves_vllms_layers(record: Status, distance: float) -> None:
    made, calls = path(SOUND | {"layer 1 mlp": distance})
    assert not taken(made) and not taken(made) and calls == [2]
    assert (
        "1 of 3 parts" in record.faults["target_decode"] and "layer 1 mlp" in record.faults["target_decode"]
    )
    assert record.choices["target decode"].choice == "layers" and not record.proofs


def test_a_batch_that_cannot_be_compared_is_unknown_until_a_later_one(record: Status) -> None:
    made, calls = path(NotChecked("too few slots"), SOUND)
    assert taken(made)
    assert record.choices["target decode check"].choice == "unknown" and not record.proofs
    assert taken(made) and calls == [2, 2]
    assert record.choices["target decode check"].choice == "ok" and record.proofs


def test_batches_that_allow_no_comparison_use_up_no_attempt(record: Status) -> None:
    """vLLM profiles graph memory on few slots, more often than there are attempts, before the real warm-up."""
    made, calls = path(*[NotChecked("too few slots")] * (fused.CHECKS + 3), SOUND)
    assert all(taken(made) for _ in range(20))
    assert len(calls) == fused.CHECKS + 4
    assert record.choices["target decode check"].choice == "ok" and record.proofs


def test_what_shows_nothing_is_not_asked_at_every_step(record: Status) -> None:
    made, calls = path(Inconclusive("it adds nothing"))
    assert all(taken(made) for _ in range(20))
    assert len(calls) == fused.CHECKS and not record.proofs and not record.faults


def test_a_comparison_that_fails_leaves_vllms_layers(
    record: Status, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = path(RuntimeError("boom"), option="fused")
    assert not taken(made) and not taken(made)
    assert "RuntimeError: boom" in record.choices["target decode"].reason


def test_distances() -> None:
    before, added = torch.zeros(2, 4), torch.ones(2, 4)
    assert away(1.2 * added, added, before, "it") == pytest.approx(0.2)
    assert away(1.2 * added, added, before, "it", rounding=0.1) == pytest.approx(0.1)
    assert away(1.05 * added, added, before, "it", rounding=0.1) == 0
    assert math.isnan(away(added * math.nan, added, before, "it", rounding=0.1))
    # vLLM's layer left the state alone, ours did not.
    assert away(added, before, before, "it") == math.inf
    with pytest.raises(Inconclusive, match="it adds nothing"):
        away(before, before, before, "it")


def kda(name: str, slots: int) -> Any:
    states = SimpleNamespace(recurrent=torch.zeros(slots, 1))
    layer = KdaLayer(name, *(None,) * 6)  # type: ignore[arg-type]
    object.__setattr__(layer, "states", lambda: states)
    return SimpleNamespace(attention=layer)


def test_every_group_gets_slots_of_its_own_and_its_old_ones_back() -> None:
    layers = [kda(name, 16) for name in "abc"]
    shared, own = torch.zeros(2, 4, dtype=torch.int32), torch.full((4, 3), 7, dtype=torch.int32)
    batches = {"a": KdaBatch(shared), "b": KdaBatch(own[:, 1]), "c": KdaBatch(shared)}
    with check.redirected([], layers, batches, 2):
        assert shared.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert own[:, 1].tolist() == [9, 10, 11, 12] and own[:, 0].tolist() == [7] * 4
    assert not shared.any() and (own == 7).all()
    with (
        pytest.raises(NotChecked, match="9 state slots are too few for 2 groups"),
        check.redirected([], [kda(name, 9) for name in "abc"], batches, 2),
    ):
        pass
    assert not shared.any() and (own == 7).all()
