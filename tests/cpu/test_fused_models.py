# SPDX-License-Identifier: Apache-2.0
"""Target and draft in front of the fused path: what they hand it, what they ask of vLLM, and who has a path at all."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3ForCausalLM

from vllm_ling.decode import captured
from vllm_ling.decode.body import FusedBody, FusedLayer
from vllm_ling.decode.layers import KdaLayer, MlaLayer
from vllm_ling.models import ling
from vllm_ling.models.ling import LingForCausalLM, fused_target
from vllm_ling.spec_decode import mtp
from vllm_ling.spec_decode.mtp import LingMTPModel, fused_draft
from vllm_ling.status import STATUS


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    STATUS.choices.clear()
    yield
    STATUS.choices.clear()


class Path:
    """Takes what is usual, up to eight tokens."""

    def __init__(self, batch: Any = None) -> None:
        self.asked: list[tuple[int, str]] = []
        self.built: Any = Body()
        self.batch = batch

    def take(self, tokens: int, device: torch.device, unusual: str) -> tuple[Any, Any] | None:
        self.asked.append((tokens, unusual))
        return None if unusual or tokens > 8 else (self.built, self.batch)


class Body:
    """Stands in for both `Built` and its body."""

    taps: Any = None

    @property
    def body(self) -> "Body":
        return self

    def __call__(self, residual: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        self.given = (residual, positions, batch)
        return residual + 1


def embed(ids: torch.Tensor) -> torch.Tensor:
    return ids.view(-1, 1) * 10.0


class Draft(LingMTPModel):
    """Without the constructor, which needs an engine's configuration."""

    do_not_compile = True  # vLLM's wrapper then calls `forward`

    def __init__(self, path: Any) -> None:
        torch.nn.Module.__init__(self)
        self._fused = path
        self.model: Any = SimpleNamespace(layers={0: "the layer"}, embed_tokens=embed)

    def forward(self, *args: Any, **inputs: Any) -> tuple[Any, ...]:
        return ("upstream", args, inputs)


class Target(LingForCausalLM):
    """Likewise."""

    def __init__(self, path: Any) -> None:
        torch.nn.Module.__init__(self)
        self._fused, self.ling_taps = path, None
        self.model: Any = SimpleNamespace(word_embeddings=embed, norm=lambda x: x * 2)


IDS, POSITIONS, HIDDEN = torch.tensor([1, 2]), torch.tensor([5, 6]), torch.zeros(2, 1)
INPUTS = {"input_ids": IDS, "positions": POSITIONS, "hidden_states": HIDDEN}


def test_a_refused_draft_calls_upstream_with_everything() -> None:
    given = INPUTS | {"input_ids": torch.arange(9), "spec_step_idx": 1}
    refusing = Path()
    for path in (refusing, None):
        assert Draft(path)(**given) == ("upstream", (), given)
    assert refusing.asked == [(9, "")]


def test_a_taken_draft_runs_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(mtp, "draft_step", lambda *arguments: calls.append(arguments) or "fused")
    path = Path()
    draft = Draft(path)
    assert draft(**INPUTS) == "fused"
    layer, built, embeds, hidden, positions = calls[0]
    assert layer == "the layer" and built is path.built
    assert embeds.tolist() == [[10.0], [20.0]]
    assert hidden is HIDDEN and positions is POSITIONS
    given = torch.ones(2, 1)
    draft(**INPUTS, inputs_embeds=given)
    assert calls[1][2] is given
    assert draft(IDS, hidden_states=HIDDEN)[0] == "upstream", "called by position"
    assert len(calls) == 2 and len(path.asked) == 2


def test_draft_step_joins_embedding_and_hidden_state() -> None:
    """In this order; the layer adds to what the entry gives."""
    seen: list[torch.Tensor] = []

    def entry(embeds: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cat([embeds, hidden], -1))
        return out.copy_(2 * embeds + 3 * hidden)

    layer = SimpleNamespace(final_layernorm=lambda x: x.mul(100.0))
    built = SimpleNamespace(entry=entry, body=lambda x, positions, batches: x + positions[:, None])
    embeds, hidden = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
    found = mtp.draft_step(layer, built, embeds, hidden, POSITIONS)
    assert seen[0].tolist() == [[1, 10], [2, 20]]
    assert found.tolist() == [[3700], [7000]]


def test_a_taken_target_runs_from_embedding_to_final_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(batch="the batch")
    model = Target(path)
    model.ling_taps = {}
    reports: list[bool] = []
    monkeypatch.setattr(ling, "report", lambda: reports.append(True))
    assert model.forward(IDS, POSITIONS).tolist() == [[22], [42]]
    assert reports, "what was compared at load is told by now"
    residual, positions, batch = path.built.given
    assert residual.tolist() == [[10], [20]] and positions is POSITIONS and batch == "the batch"
    assert path.built.taps is model.ling_taps


@pytest.mark.parametrize(
    ("ids", "middle", "embeds", "asked"),
    [
        (torch.arange(9), None, None, [(9, "")]),
        (IDS, None, HIDDEN, [(2, "embeddings come from outside")]),
        (None, None, HIDDEN, []),
        (IDS, "a stage before", None, []),
    ],
    ids=["too many", "both", "embeddings", "pipeline"],
)
def test_another_target_batch_is_upstreams(
    ids: Any, middle: Any, embeds: Any, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BailingMoeV3ForCausalLM, "forward", lambda self, *given: ("upstream", *given))
    path = Path()
    for model in (Target(path), Target(None)):
        found = model.forward(ids, POSITIONS, middle, embeds)
        assert found[0] == "upstream"
        assert all(x is y for x, y in zip(found[1:], (ids, POSITIONS, middle, embeds), strict=True))
    assert path.asked == asked


def config(**sizes: int) -> Any:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel | sizes))


KDA = SimpleNamespace(self_attn=SimpleNamespace(prefix="model.layers.1.self_attn", f_proj=None))
OTHER_KDA = SimpleNamespace(self_attn=SimpleNamespace(prefix="model.layers.3.self_attn", f_proj=None))
MLA = SimpleNamespace(self_attn=SimpleNamespace(prefix="model.layers.0.self_attn"))
MISSING = SimpleNamespace()


def model_of(*layers: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


@pytest.mark.parametrize(
    ("layers", "sizes", "option", "reason"),
    [
        ((MLA, KDA), {}, "layers", "ling.decode=layers"),
        ((MLA, KDA), {"tensor_parallel_size": 2}, "auto", "it serves one GPU"),
        ((MLA, KDA), {"pipeline_parallel_size": 2}, "fused", "it serves one GPU"),
        ((MLA, KDA), {"data_parallel_size": 2}, "auto", "it serves one GPU"),
        ((MLA, MISSING), {}, "auto", "no KDA layer"),
    ],
)
def test_who_has_no_target_path(layers: Any, sizes: dict[str, int], option: str, reason: str) -> None:
    assert fused_target(model_of(*layers), config(**sizes), option) is None
    decided = STATUS.choices["target decode"]
    assert decided.choice == "layers" and reason in decided.reason


def test_the_target_path_asks_every_kda_layer() -> None:
    found = fused_target(model_of(MISSING, KDA, MLA, OTHER_KDA), config(), "auto")
    assert found._kda == ["model.layers.1.self_attn", "model.layers.3.self_attn"] and not STATUS.choices


@pytest.mark.parametrize(
    ("layers", "sizes", "option", "reason"),
    [
        ({0: MLA}, {}, "layers", "ling.decode=layers"),
        ({0: MLA, 1: MLA}, {}, "auto", "not one layer on one GPU"),
        ({0: MLA}, {"tensor_parallel_size": 2}, "auto", "not one layer on one GPU"),
    ],
)
def test_who_has_no_draft_path(layers: Any, sizes: dict[str, int], option: str, reason: str) -> None:
    assert fused_draft(layers, config(**sizes), option) is None
    assert STATUS.choices["draft decode"].reason == reason


def test_the_draft_path_has_no_kda_layer() -> None:
    assert fused_draft({0: MLA}, config(), "auto")._kda == ()


@pytest.mark.parametrize(("option", "lines"), [("fused", 2), ("auto", 0)])
def test_a_path_that_was_asked_for_is_missed_aloud(
    option: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("vllm_ling.models.ling.warning", said.append)
    monkeypatch.setattr("vllm_ling.spec_decode.mtp.warning", said.append)
    two = config(tensor_parallel_size=2)
    assert fused_target(model_of(MLA, KDA), two, option) is None
    assert fused_draft({0: MLA}, two, option) is None
    assert len(said) == lines and all("ling.decode=fused cannot be honoured (" in line for line in said)


@pytest.mark.parametrize("alone", [True, False])
def test_captures_are_noted_by_path_and_attention(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(mtp, "draft_step", lambda *_: "fused")
    captured.forget()
    captured.preparing(2, 1)
    path = Path()
    path.built.attends_alone = lambda _: alone  # type: ignore[attr-defined]
    Target(path)(IDS, POSITIONS)
    assert bool(captured.problem((2, 1))) != alone
    assert captured.problem((2, 2)), "another number of sequences"
    Draft(path)(**INPUTS)
    assert bool(captured.problem((2, 1))) != alone
    Draft(None)(**INPUTS)
    assert captured.problem((2, 1)), "a draft of vLLM's layers reads the plan"
    captured.forget()


def test_a_body_attends_alone_if_no_mla_layer_is_left_to_vllm() -> None:
    def layer(ours: bool | None) -> Any:
        if ours is None:
            return FusedLayer(KdaLayer.__new__(KdaLayer), None)  # type: ignore[arg-type]
        attention = MlaLayer.__new__(MlaLayer)
        batch = SimpleNamespace(batch=lambda tokens: "batch" if tokens < 4 else None)
        object.__setattr__(attention, "latent", batch if ours else None)
        return FusedLayer(attention, None)  # type: ignore[arg-type]

    def alone(tokens: int, *layers: bool | None) -> bool:
        return FusedBody([layer(one) for one in layers], None).attends_alone(tokens)  # type: ignore[arg-type]

    assert alone(3, None, True, True) and alone(3, None)
    assert not alone(3, True, False) and not alone(4, None, True)
