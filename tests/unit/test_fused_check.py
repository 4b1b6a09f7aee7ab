# SPDX-License-Identifier: Apache-2.0
"""What the comparison at load makes of what it finds; `tests/cpu/test_fused_wiring.py` runs it in an engine."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ling.decode import check, compared, fused
from vllm_ling.decode.check import BOUND, Inconclusive, NotChecked, away
from vllm_ling.decode.check_inputs import vllm_inputs
from vllm_ling.decode.compared import Kind, kind_of
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

    body: Any = SimpleNamespace(attended=lambda tokens: 0)
    built: Any = fused.Built(body, 8, compare)
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


def test_what_was_not_compared_does_not_serve(record: Status) -> None:
    """However many warm-ups leave no room for it: the next one may."""
    made, calls = path(*[NotChecked("too few slots")] * 3 * compared.CHECKS, SOUND)
    for _ in range(3 * compared.CHECKS):
        assert not taken(made)
    found = record.choices["target decode check"]
    assert (found.choice, found.reason) == ("unknown", "2 tokens: too few slots") and not record.proofs
    assert taken(made) and taken(made) and len(calls) == 3 * compared.CHECKS + 1
    assert record.choices["target decode check"].choice == "ok" and record.proofs


def test_comparisons_that_show_nothing_come_to_an_end(record: Status) -> None:
    made, calls = path(Inconclusive("layer 0 mlp adds nothing"))
    assert not any(taken(made) for _ in range(20)) and len(calls) == compared.CHECKS
    found = record.choices["target decode"]
    assert found.choice == "layers" and "layer 0 mlp adds nothing" in found.reason
    assert not record.proofs and not record.faults


def test_a_graph_of_batches_that_were_not_compared_goes_through_the_layers(
    record: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = path(SOUND)
    made._built = made._build(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not taken(made) and not calls
    assert "a graph was captured" in record.choices["target decode check"].reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert taken(made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert taken(made) and len(calls) == 1
    assert record.choices["target decode check"].choice == "ok"


def verification(sequences: int, room: int) -> dict[str, KdaBatch]:
    slots = torch.ones(sequences, room, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    return {"a": KdaBatch(slots, starts, torch.ones(sequences, dtype=torch.int32), room)}


def test_kinds() -> None:
    plain = {"a": KdaBatch(torch.ones(3, dtype=torch.int32))}
    assert kind_of(3, plain) == Kind(4, 1) and kind_of(5, {}) == Kind(8) and kind_of(1, {}) == Kind(1)
    assert kind_of(4, verification(1, 4)) == Kind(4, 4, several=True)
    assert kind_of(4, verification(4, 4)) == Kind(4, 4), "room for drafts, but one token each"
    assert str(Kind(4, 4, several=True)) == "4 tokens, several of a sequence" and str(Kind(1)) == "1 token"
    assert kind_of(1, {}, 2) == Kind(1, attended=2) and kind_of(1, plain, 2) == Kind(1, 1, attended=2)
    assert str(Kind(1, attended=2)) == "1 token, our attention in 2 layers"


def test_every_kind_is_compared_before_it_serves(record: Status) -> None:
    made, calls = path(SOUND, SOUND | {"layer 0 mlp": 0.05}, SOUND)
    batches = verification(4, 4)
    made._facts = lambda tokens, unusual: (BatchFacts(tokens, 8), batches)

    def take(tokens: int) -> bool:
        return made.take(tokens, torch.device("cpu"), "") is not None

    assert take(4) and take(3) and calls == [4]
    batches = verification(1, 4)
    assert take(4) and calls == [4, 4], "the first one with several tokens of a sequence"
    assert "0.0500" in record.proofs["target_decode"], "the furthest of all kinds"
    assert take(1) and take(1) and calls == [4, 4, 1]
    assert "4 tokens; 4 tokens, several of a sequence; 1 token" in record.proofs["target_decode"]
    assert "0.0500" in record.proofs["target_decode"]


def test_several_tokens_of_a_sequence_show_what_one_does(record: Status) -> None:
    made, calls = path(SOUND)
    batches = verification(1, 4)
    made._facts = lambda tokens, unusual: (BatchFacts(tokens, 8), batches)
    assert taken(made)
    batches = verification(2, 4)
    assert taken(made) and calls == [2]
    batches = verification(2, 2)
    assert taken(made) and calls == [2, 2], "another KDA kernel"


def test_our_attention_and_vllms_are_compared_apart(record: Status) -> None:
    """A draft's batch may hold a prompt or not, at the same number of tokens."""
    made, calls = path(SOUND)
    made._built = made._build(torch.device("cpu"))
    for attended, compared_so_far in ((0, 1), (3, 2), (0, 2), (3, 2)):
        made._built.body.attended = lambda tokens, found=attended: found
        assert taken(made) and len(calls) == compared_so_far


def test_a_batch_that_our_attention_cannot_read_leaves_vllms_layers(record: Status) -> None:
    def unreadable(tokens: int) -> int:
        raise AttributeError("no seq_lens")

    made, calls = path(SOUND)
    made._built = made._build(torch.device("cpu"))
    made._built.body.attended = unreadable
    assert not taken(made) and not calls
    assert "AttributeError: no seq_lens" in record.choices["target decode"].reason


def test_a_kind_that_disagrees_ends_the_path_for_all(record: Status) -> None:
    made, calls = path(SOUND, SOUND | {"layer 1 mlp": 0.5})
    assert taken(made) and made.take(4, torch.device("cpu"), "") is None
    assert not taken(made) and calls == [2, 4]
    assert "(4 tokens): layer 1 mlp 0.50" in record.faults["target_decode"]


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


class Attention(torch.nn.Module):
    """Over one key: whatever the query is, the value comes out."""

    kv_cache = torch.zeros(2, 16, 4)

    def forward(self, query: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, **_: Any) -> torch.Tensor:
        self.kv_cache[0, : len(latent)] = latent
        return latent


class Half:
    """An MLA layer's half, vLLM's (called with positions last) or ours: adds `sign` times what attention gives."""

    prefix = "mla"

    def __init__(self, attention: Attention, turn: float = 1.0, calls: bool = True) -> None:
        self.mla_attn = SimpleNamespace(mla_attn=attention)
        self.turn, self.calls = turn, calls

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        attend = self.mla_attn.mla_attn if self.calls else self.mla_attn.mla_attn.forward
        if len(rest) == 1:
            return attend(x, x, x[:, None], output_shape=x.shape)
        x += attend(self.turn * x, x, x[:, None])
        return None


def mlp(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def layer_of(half: Half, **fields: Any) -> Any:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return SimpleNamespace(
        input_layernorm=same, self_attn=half, post_attention_layernorm=same, mlp=mlp, **fields
    )


def compare(ours: Half, second: Any, stream: torch.Tensor) -> dict[str, float]:
    body: Any = SimpleNamespace(layers=[SimpleNamespace(attention=ours, mlp=second)], space=None)
    return check.disagreements([layer_of(Half(ours.mla_attn.mla_attn))], body, stream, {})


def good_mlp(x: torch.Tensor, space: Any) -> None:
    x += mlp(x)


STREAM = torch.ones(2, 4)


def test_a_query_that_one_key_hides_is_found() -> None:
    """In vLLM's warm-up one token sees one key, and attention gives its value for any query."""
    attention = Attention()
    assert compare(Half(attention), good_mlp, STREAM)["layer 0 attention"] == 0
    assert compare(Half(attention, turn=1.3), good_mlp, STREAM)["layer 0 attention"] == pytest.approx(0.3)
    assert not attention._forward_pre_hooks and not attention.kv_cache.any(), "everything is put back"


class Whole(torch.nn.Module):
    """vLLM's attention over one key of three latents and one rotary value, which comes out."""

    W_UK_T = torch.tensor([[[1.0, 2, 0], [0, 1, 0], [3, 0, 1]]])

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = torch.zeros(2, 16, 4)

    def forward(self, query: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, **_: Any) -> torch.Tensor:
        row = torch.cat([latent, key[:, 0]], -1)
        self.kv_cache[0, : len(row)] = row
        return row


class Own:
    """An MLA layer's half, vLLM's (called with positions last) or ours, which attends with a kernel of its own."""

    prefix = "mla"

    def __init__(self, attention: Whole, turn: float = 1.0, absorb: float | None = 1.0) -> None:
        self.mla_attn = SimpleNamespace(mla_attn=attention)
        self.turn, self.absorb = turn, absorb
        self.latent = SimpleNamespace(
            kernel=SimpleNamespace(query=torch.ones(8, 1, 4)),
            weights=lambda: SimpleNamespace(key=attention.W_UK_T),
            batch=lambda tokens: SimpleNamespace(cache=attention.kv_cache, slots=torch.arange(8)),
        )

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        attend = self.mla_attn.mla_attn
        if len(rest) == 1:
            return attend(x.view(-1, 1, 4), x[:, :3], x[:, None, 3:])
        if self.absorb is not None:
            plain = torch.einsum("tp,pl->tl", x[:, :3], self.absorb * attend.W_UK_T[0])
            self.latent.kernel.query[: len(x), 0] = torch.cat([plain, self.turn * x[:, 3:]], -1)
        x += attend.forward(x, x[:, :3], x[:, None, 3:])
        return None


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, 0), ({"absorb": 1.3}, 0.3), ({"turn": 1.4}, 0.4), ({"absorb": None}, math.nan)],
    ids=["sound", "another projection", "another rotation", "never written"],
)
def test_our_attentions_queries_are_compared_in_the_latent_space(changes: Any, found: float) -> None:
    attention = Whole()
    stock, ours = layer_of(Own(attention)), Own(attention, **changes)
    body: Any = SimpleNamespace(layers=[SimpleNamespace(attention=ours, mlp=good_mlp)], space=None)
    away = check.disagreements([stock], body, STREAM, {})["layer 0 attention"]
    assert away == pytest.approx(found, nan_ok=True)
    assert not attention.kv_cache.any()


def test_where_vllms_attention_serves_both_sides_are_called() -> None:
    ours: Any = Half(Attention(), turn=1.3)
    ours.latent = SimpleNamespace(batch=lambda tokens: None)
    assert compare(ours, good_mlp, STREAM)["layer 0 attention"] == pytest.approx(0.3)


def test_attention_that_was_not_seen_shows_nothing() -> None:
    with pytest.raises(Inconclusive, match="layer 0 attention does not call"):
        compare(Half(Attention(), calls=False), good_mlp, STREAM)


def test_hooks_go_when_a_half_fails() -> None:
    attention = Attention()
    with pytest.raises(RuntimeError), vllm_inputs(layer_of(Half(attention))):
        raise RuntimeError
    assert not attention._forward_pre_hooks


class Tie:
    """An MLP that is beyond the bound in its first calls."""

    def __init__(self, *errors: float) -> None:
        self.errors, self.seen = list(errors), list[torch.Tensor]()

    def __call__(self, x: torch.Tensor, space: Any) -> None:
        self.seen.append(x.clone())
        x += (1 + (self.errors.pop(0) if self.errors else 0)) * mlp(x)


@pytest.mark.parametrize(
    ("errors", "calls", "found"),
    [
        ((0.05,), 1, 0.05),
        ((0.2, 0.02), 2, 0.02),
        ((0.2, 0.3), 2, 0.2),
        ((math.nan,), 1, math.nan),
    ],
    ids=["sound", "a near tie", "wrong twice", "no number"],
)
def test_an_mlp_beyond_the_bound_is_tried_on_another_stream(
    errors: tuple[float, ...], calls: int, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tie, said = Tie(*errors), list[str]()
    monkeypatch.setattr(check, "info", said.append)
    away = compare(Half(Attention()), tie, STREAM)["layer 0 mlp"]
    assert away == pytest.approx(found, abs=0.01, nan_ok=True) and len(tie.seen) == calls
    assert ["a near tie" in line for line in said] == [True] * (calls == 2 and found < BOUND)
    if calls == 2:
        first, second = tie.seen
        assert (first - second).square().mean() > 0.1 and check.rms(second) == pytest.approx(2, rel=0.5)
