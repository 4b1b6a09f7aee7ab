# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's MLA plan of a Ling draft is updated in place; that of other models stays vLLM's."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder

from vllm_ling.spec_decode import draft_graph
from vllm_ling.status import STATUS

MODULE = "vllm.v1.attention.backends.mla.flashattn_mla"


class Builder(AttentionMetadataBuilder[Any]):
    """Stands in for vLLM's class, whose module needs a GPU's libraries."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.dcp_world_size = device  # stands in for it

    def build(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in where vLLM's module would be, and as it was afterwards."""
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(FlashAttnMLAMetadataBuilder=Builder))  # type: ignore[misc]
    monkeypatch.setattr(Builder, "__init__", Builder.__init__)
    monkeypatch.setattr(Builder, "update_draft_decode_metadata", Builder.update_draft_decode_metadata)
    monkeypatch.setattr(STATUS, "choices", {})


def test_the_installed_vllm_still_needs_it() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "v1/attention/backends/mla/flashattn_mla.py"
    source = path.read_text(encoding="utf-8")
    assert "class FlashAttnMLAMetadataBuilder" in source and "def _schedule_decode" in source
    assert "supports_draft_decode_metadata_update" not in source, "vLLM does it itself: remove the workaround"


def test_without_flashattention_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace())  # type: ignore[misc]
    draft_graph.join_draft_steps()
    assert STATUS.choices["draft steps"].choice == "vLLM's"


def builder(architecture: str, ranks: int = 1) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(architectures=[architecture]))
    make: Any = Builder
    return make(None, ["layer"], config, ranks)


def test_only_a_lings_plans_are_updated_in_place() -> None:
    assert Builder.supports_draft_decode_metadata_update is False, (
        "vLLM does it itself: remove the workaround"
    )
    draft_graph.join_draft_steps()
    assert builder("BailingMoeV3ForCausalLM").supports_draft_decode_metadata_update
    assert not builder("BailingMoeV3ForCausalLM", ranks=2).supports_draft_decode_metadata_update
    assert not builder("DeepseekV3ForCausalLM").supports_draft_decode_metadata_update
    assert STATUS.choices["draft steps"].choice == "one graph"


def test_a_second_model_does_not_wrap_the_constructor_again() -> None:
    draft_graph.join_draft_steps()
    once = Builder.__init__
    draft_graph.join_draft_steps()
    assert Builder.__init__ is once


def test_a_vllm_that_does_it_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "supports_draft_decode_metadata_update", True)
    before = Builder.__init__
    draft_graph.join_draft_steps()
    assert Builder.__init__ is before and "vLLM updates" in STATUS.choices["draft steps"].reason


def test_the_schedule_is_written_where_the_graph_reads_it() -> None:
    held, asked = torch.zeros(9, dtype=torch.int32), {}

    def schedule(**facts: Any) -> torch.Tensor:
        asked.update(facts)
        return torch.arange(5, dtype=torch.int32)

    plan = SimpleNamespace(
        scheduler_metadata=held,
        seq_lens=torch.tensor([7, 9]),
        query_start_loc=torch.tensor([0, 1, 2]),
        max_query_len=1,
        max_seq_len=64,
        max_num_splits=32,
    )
    made: Any = SimpleNamespace(_schedule_decode=schedule)
    draft_graph.update(made, SimpleNamespace(decode=plan))
    assert held.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0] and plan.scheduler_metadata is held
    assert asked["num_reqs"] == 2 and asked["max_num_splits"] == 32 and asked["causal"]
    draft_graph.update(made, SimpleNamespace(decode=None))
    plan.scheduler_metadata = None
    draft_graph.update(made, SimpleNamespace(decode=plan))
