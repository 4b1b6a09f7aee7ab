# SPDX-License-Identifier: Apache-2.0
"""DraftRows on bare heads of every kind: the full head's logits at its rows, full ids back, renewed by a reload."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.head_bf16 import HeadBf16Method
from vllm_ling.quant.head_fp8 import HeadFp8Method
from vllm_ling.spec_decode import shared_head
from vllm_ling.spec_decode.draft_rows import DraftRows
from vllm_ling.spec_decode.faults import broken_head
from vllm_ling.spec_decode.shared_head import SharedHead, UnboundHeadMethod, register_target_head
from vllm_ling.status import STATUS

VOCAB, HIDDEN = 640, 256
IDS = [0, 5, 127, 128, 300, 301, 511, 512, 639]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    monkeypatch.setattr(shared_head, "_target_heads", set())
    STATUS.choices.clear()
    yield
    torch.set_default_dtype(torch.float32)
    STATUS.faults.clear()
    STATUS.choices.clear()


class Processor:
    """What DraftRows needs of vLLM's LogitsProcessor."""

    org_vocab_size = VOCAB

    def __call__(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        assert layer.tp_size == 1
        return layer.quant_method.apply(layer, hidden)


def random_weight(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float32).mul(0.05)


def fill(head: Any, kind: str, seed: int) -> None:
    """Loads weights, as a start or a reload does."""
    weight = random_weight(seed)
    if kind == "fp8_online":
        head.weight.weight_loader(head.weight, weight.bfloat16())
    elif kind == "bf16":
        head.weight.data.copy_(weight)
    else:
        head.weight.data.copy_((weight * 500).to(torch.float8_e4m3fn))
        scale = head.quant_method.scale(head)
        values = torch.linspace(1e-3, 3e-3, scale.numel(), dtype=torch.float32).view(scale.shape)
        scale.weight_loader(scale, values)
    head.quant_method.process_weights_after_loading(head)


def target(kind: str) -> Any:
    head: Any = nn.Module()
    head.embedding_dim, head.tp_size = HIDDEN, 1
    head.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=VOCAB)
    head.quant_method = HeadBf16Method() if kind == "bf16" else HeadFp8Method(kind, "fail", dummy=False)  # type: ignore[arg-type]
    head.quant_method.create_weights(head, HIDDEN, [VOCAB], HIDDEN, VOCAB, torch.bfloat16, weight_loader=None)
    fill(head, kind, 0)
    register_target_head(head)
    return head


def draft(rows: DraftRows, fail: bool = True) -> SharedHead:
    placeholder: Any = nn.Module()
    placeholder.quant_method = UnboundHeadMethod()
    return SharedHead(placeholder, fail=fail, inject="none", rows=rows)


def check(rows: DraftRows, head: Any) -> None:
    hidden = torch.randn(
        3, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float32
    ).bfloat16()
    full = head.quant_method.apply(head, hidden)
    logits = rows.logits(Processor(), hidden)
    assert logits.shape == (3, VOCAB) and logits.dtype == full.dtype
    torch.testing.assert_close(logits[:, IDS], full[:, IDS], rtol=1e-2, atol=1e-2)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[IDS] = False
    assert bool((logits[:, outside] == -torch.inf).all())
    assert torch.equal(rows.top_tokens(Processor(), hidden), logits.argmax(-1))


KINDS = ["fp8_online", "fp8_row", "fp8_block", "bf16"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_heads(kind: str) -> None:
    head = target(kind)
    rows = DraftRows(IDS, "list.json")
    assert not rows.active
    holder = draft(rows)
    assert not rows.active, "nothing to gather from before the head is bound"
    holder.head = head
    assert rows.active and holder.head is head
    check(rows, head)
    assert STATUS.choices["draft_vocab"].choice == f"{len(IDS)} of {VOCAB} rows"


@pytest.mark.parametrize("kind", KINDS)
def test_a_reload_renews_the_rows_in_place(kind: str) -> None:
    head = target(kind)
    rows = DraftRows(IDS, "list.json")
    holder = draft(rows)
    holder.head = head
    before = {name: tensor.data_ptr() for name, tensor in rows._layer.named_parameters()}
    stale = rows.logits(Processor(), torch.ones(1, HIDDEN))
    fill(head, kind, 1)
    assert not torch.equal(rows.logits(Processor(), torch.ones(1, HIDDEN)), stale)
    check(rows, head)
    # CUDA graphs replay with the addresses they were captured with.
    assert {name: tensor.data_ptr() for name, tensor in rows._layer.named_parameters()} == before


def test_block_scales_are_applied_exactly() -> None:
    head = target("fp8_block")
    rows = head.quant_method.gather(head, torch.tensor(IDS))
    exact = dequantize_block_fp8(head.weight, head.weight_scale_inv, (128, 128), torch.bfloat16)
    assert list(rows) == ["weight"] and torch.equal(rows["weight"], exact[IDS])


def test_row_scales_go_along() -> None:
    head = target("fp8_row")
    rows = head.quant_method.gather(head, torch.tensor(IDS))
    assert torch.equal(rows["weight"].view(torch.uint8), head.weight.view(torch.uint8)[IDS])
    assert torch.equal(rows["weight_scale"], head.weight_scale[IDS])


def test_rows_that_save_nothing_are_left() -> None:
    rows = DraftRows(list(range(VOCAB // 2 + 10)), "list.json")
    draft(rows).head = target("fp8_block")
    assert not rows.active
    choice = STATUS.choices["draft_vocab"]
    assert choice.choice == "full head" and "without their block scales" in choice.reason
    half = DraftRows(list(range(VOCAB // 2 + 10)), "list.json")
    draft(half).head = target("fp8_row")
    assert half.active


def test_rows_never_come_from_an_unproven_head() -> None:
    rows = DraftRows(IDS, "list.json")
    holder = draft(rows, fail=False)
    head = target("fp8_row")
    holder.head = broken_head(head, "head_scale")
    assert not rows.active and "not proven" in STATUS.choices["draft_vocab"].reason
    holder.head = head
    assert rows.active, "a sound head that is bound later is used"
    check(rows, head)
