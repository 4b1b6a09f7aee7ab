# SPDX-License-Identifier: Apache-2.0
"""Scores a tiny-ling model in plain torch: exact match, accept length, effect of the clamps."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vllm_ling.reference.model import LingReference
from vllm_ling.reference.speculate import speculate
from vllm_ling.tiny.problems import HELDOUT_PATH, final_number
from vllm_ling.tiny.tokenizer import EOS, PAD, render_chat, token_id

MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Score:
    """exact_match: share of right final numbers; accept_length: see `speculate`; tokens: mean length."""

    items: int
    exact_match: float
    accept_length: float
    tokens: float


def load_heldout(limit: int | None = None, path: Path = HELDOUT_PATH) -> list[dict[str, str]]:
    """The first `limit` held-out items as {"question", "answer"}."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows[:limit]


def score(
    model: LingReference, tokenizer: Tokenizer, items: list[dict[str, str]], drafts: int, batch: int = 300
) -> Score:
    """Greedy answers to `items`; the accept length is 1.0 for a model without an MTP layer."""
    stop = frozenset({token_id(tokenizer, EOS), token_id(tokenizer, PAD)})
    prompts = [tokenizer.encode(render_chat(item["question"])).ids for item in items]
    outputs: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        outputs += model.generate(prompts[start : start + batch], MAX_NEW_TOKENS, stop)
    right = sum(
        final_number(tokenizer.decode(output)) == final_number(item["answer"])
        for item, output in zip(items, outputs, strict=True)
    )
    accept = 1.0
    if model.config.num_nextn_predict_layers:
        accept = speculate(model, prompts, outputs, drafts).accept_length
    length = sum(map(len, outputs)) / len(items)
    return Score(len(items), round(right / len(items), 4), round(accept, 3), round(length, 1))


@dataclass(frozen=True)
class ClampEffect:
    """What ignoring every clamp does to teacher-forced logits."""

    positions: int
    largest_logit_change: float
    changed_share: float
    top1_flips: int


@torch.inference_mode()
def clamp_effect(model: LingReference, tokenizer: Tokenizer, items: list[dict[str, str]]) -> ClampEffect:
    """Compares logits with and without clamps over held-out texts; above 1e-3 counts as changed."""
    encoded = [tokenizer.encode(render_chat(item["question"], item["answer"])).ids for item in items]
    width = max(map(len, encoded))
    device = model.lm_head.weight.device
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in encoded], device=device)
    valid = torch.arange(width, device=device) < torch.tensor([[len(row)] for row in encoded], device=device)
    with_clamps: Tensor = model(tokens)[valid]
    with _clamps_off(model):
        without: Tensor = model(tokens)[valid]
    change = (with_clamps - without).abs().amax(-1)
    flips = (with_clamps.argmax(-1) != without.argmax(-1)).sum()
    return ClampEffect(
        int(change.numel()),
        round(float(change.max()), 4),
        round(float((change > 1e-3).float().mean()), 4),
        int(flips),
    )


@contextmanager
def _clamps_off(model: LingReference) -> Iterator[None]:
    saved = [(moe, moe.limit, moe.shared_experts.limit) for _, moe in model.moe_layers()]
    try:
        for moe, _, _ in saved:
            moe.limit = moe.shared_experts.limit = None
        yield
    finally:
        for moe, routed, shared in saved:
            moe.limit, moe.shared_experts.limit = routed, shared
