# SPDX-License-Identifier: Apache-2.0
"""The trap catalogue: ways in which drafting goes wrong without an error, the harm of each, and what catches it.

Harm is the accept length of three drafts on held-out problems, replayed in plain torch; the sound draft has about 3.6.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.errors import LingError
from vllm_ling.eval.studies.draft_traces import sample, traces
from vllm_ling.quant.head_fp8 import HeadFp8Method
from vllm_ling.quant.row_fp8 import quantize_row_fp8
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.model import LingReference
from vllm_ling.spec_decode import shared_head
from vllm_ling.spec_decode.faults import broken_head
from vllm_ling.spec_decode.shared_head import SharedHead, UnboundHeadMethod, find_problem
from vllm_ling.status import STATUS
from vllm_ling.tiny.evaluate import load_heldout
from vllm_ling.tiny.tokenizer import render_chat

pytestmark = pytest.mark.trap
DRAFTS = 3


@pytest.fixture(scope="module")
def model() -> LingReference:
    folder = resolve_model("tiny-ling")
    assert folder is not None
    return from_checkpoint(folder)


@pytest.fixture(scope="module")
def texts(model: LingReference) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = Tokenizer.from_file(str(resolve_model("tiny-ling") / "tokenizer.json"))  # type: ignore[operator]
    prompts = [tokenizer.encode(render_chat(item["question"])).ids for item in load_heldout(4)]
    return prompts, sample(model, prompts, 32, 0.0, seed=0)


def accept_length(model: LingReference, texts: tuple[list[list[int]], list[list[int]]]) -> float:
    rounds = tokens = 0
    for text in traces(model, *texts, DRAFTS):
        last = text.prompt
        while last < len(text.tokens) - 1 - DRAFTS:
            step = text.matches(last) + 1
            rounds, tokens, last = rounds + 1, tokens + step, last + step
    return tokens / rounds


def with_draft_head(model: LingReference, weight: Tensor) -> LingReference:
    """The model as its draft sees it: everything sound but the head."""
    broken = copy.copy(model)
    broken._modules = dict(model._modules)
    broken.logits = lambda hidden: F.linear(hidden, weight)  # type: ignore[method-assign]
    return broken


def fp8(model: LingReference) -> tuple[Tensor, Tensor]:
    return quantize_row_fp8(model.lm_head.weight.detach())


def read_as_bf16(model: LingReference) -> Tensor:
    codes, _ = fp8(model)
    half = codes.view(torch.uint8).reshape(-1).view(torch.bfloat16).reshape(-1, codes.shape[1])
    return F.pad(half.float().nan_to_num(0.0), (0, 0, 0, codes.shape[0] - half.shape[0]))


def other_rows_scales(model: LingReference) -> Tensor:
    codes, scale = fp8(model)
    return codes.float() * scale.roll(1)[:, None]


def nan_row(model: LingReference) -> Tensor:
    weight = model.lm_head.weight.detach().clone()
    weight[len(weight) - 3] = torch.nan
    return weight


HEADS: dict[str, tuple[Callable[[LingReference], Tensor], float]] = {
    "FP8 storage read as BF16": (read_as_bf16, 1.1),
    "a head of its own, random": (lambda m: torch.randn_like(m.lm_head.weight), 1.2),
    "stale head after a reload": (lambda m: m.lm_head.weight.detach().roll(7, 0), 1.2),
    "NaN in one row": (nan_row, 1.1),
}


def test_sound_draft(model: LingReference, texts: Any) -> None:
    sound = accept_length(model, texts)
    quantized = accept_length(with_draft_head(model, fp8(model)[0].float() * fp8(model)[1][:, None]), texts)
    assert sound > 3.2 and abs(quantized - sound) < 0.1, "the FP8 head with its scales drafts as well"


@pytest.mark.parametrize("name", HEADS)
def test_harm_of_a_broken_head(model: LingReference, texts: Any, name: str) -> None:
    make, most = HEADS[name]
    assert accept_length(with_draft_head(model, make(model)), texts) < most


def test_scale_faults_hide_from_acceptance(model: LingReference, texts: Any) -> None:
    """Without its scales, or with its neighbours', a confident model's head still drafts well: only proof finds it."""
    unscaled = fp8(model)[0].float()
    for weight in (unscaled, other_rows_scales(model)):
        assert accept_length(with_draft_head(model, weight), texts) > 3.0


@pytest.mark.parametrize("what", ["zeros", "random"])
def test_harm_of_a_layer_that_was_never_loaded(model: LingReference, texts: Any, what: str) -> None:
    broken = copy.copy(model)
    broken._modules = dict(model._modules)
    broken.model = copy.deepcopy(model.model)
    layer = broken.model.layers[model.config.num_hidden_layers]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if what == "zeros" else torch.randn_like(parameter) * 0.02
            )
    # The body before it is untouched, so verification and output are as before.
    assert torch.equal(broken.hidden(torch.tensor([[5, 6, 7]])), model.hidden(torch.tensor([[5, 6, 7]])))
    assert accept_length(broken, texts) < 1.3


# --- what catches them at load -------------------------------------------------------------------------------------


class Head(nn.Module):
    """What the proof sees of a ParallelLMHead with our FP8 method."""

    def __init__(self, rows: int = 256, hidden: int = 128) -> None:
        super().__init__()
        codes, scale = quantize_row_fp8(torch.randn(rows, hidden, dtype=torch.float32))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.embedding_dim, self.tp_size = hidden, 1
        self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=rows)
        self.quant_method = HeadFp8Method("fp8_online", "fail", dummy=False)


def plain(head: Head, weight: Tensor) -> Any:
    made = broken_head(head, "head_scale")
    made.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    return made


def nan_in(head: Head) -> Head:
    head.weight.data.view(torch.uint8)[200, 5] = 0x7F
    return head


def with_scale(head: Head, scale: Tensor | None) -> Head:
    if scale is None:
        del head.weight_scale
    else:
        head.weight_scale = nn.Parameter(scale, requires_grad=False)
    return head


CAUGHT: dict[str, tuple[Callable[[Head], Any], str, str]] = {
    "FP8 storage read as BF16": (
        lambda h: broken_head(h, "head_bytes"),
        "draft_head_not_shared",
        "bfloat16 instead",
    ),
    "FP8 cast without its scale": (
        lambda h: broken_head(h, "head_scale"),
        "draft_head_not_shared",
        "bfloat16 instead",
    ),
    "a BF16 head of its own": (
        lambda h: plain(h, torch.randn(256, 128)),
        "draft_head_not_shared",
        "differ by",
    ),
    "quantized in the target only": (
        lambda h: plain(h, h.weight.float() * h.weight_scale[:, None]),
        "draft_head_not_shared",
        "bfloat16 instead",
    ),
    "second copy in memory": (copy.deepcopy, "draft_head_not_shared", "second copy"),
    "NaN in one row": (nan_in, "draft_head_nan", "row 200"),
    "scale missing": (lambda h: with_scale(h, None), "draft_head_no_scale", "without a scale"),
    "scale of another shape": (
        lambda h: with_scale(h, torch.ones(1, 256)),
        "draft_head_scale_shape",
        "(1, 256)",
    ),
    "scale never filled": (
        lambda h: with_scale(h, torch.full((256,), torch.nan)),
        "draft_head_scale",
        "not positive",
    ),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_caught_when_the_head_is_bound(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, code, words = CAUGHT[name]
    target = Head()
    monkeypatch.setattr(shared_head, "_target_heads", {target})
    STATUS.faults.clear()
    draft = make(target)
    holder = SharedHead(placeholder(), fail=True, inject="none")
    with pytest.raises(LingError) as caught:
        holder.head = draft
    assert code in STATUS.faults and words in str(caught.value)
    # With on_fault=warn the fault is recorded and the draft goes on.
    STATUS.faults.clear()
    SharedHead(placeholder(), fail=False, inject="none").head = draft
    assert code in STATUS.faults


def test_the_targets_own_module_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Head()
    monkeypatch.setattr(shared_head, "_target_heads", {target})
    assert find_problem(target, [target]) is None


def test_a_head_that_nobody_bound_cannot_draft() -> None:
    head = placeholder()
    with pytest.raises(LingError, match="never bound"):
        head.quant_method.apply(head, torch.zeros(1, 128))


def placeholder() -> Any:
    head: Any = nn.Module()
    head.quant_method = UnboundHeadMethod()
    return head
