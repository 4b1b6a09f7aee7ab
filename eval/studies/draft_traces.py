# SPDX-License-Identifier: Apache-2.0
"""Draft traces: for every position of a text, the tokens MTP would draft there and how sure it is of each.

One batched pass per draft step gives all positions at once. Unlike `reference.speculate`, the drafts feed on their own
tokens, right or wrong, so that policies which look at a draft's confidence can be replayed exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_ling.reference.cache import Cache
from vllm_ling.reference.model import LingReference


@dataclass(frozen=True)
class Trace:
    """One text: `prompt` tokens are given, the rest is emitted.

    Attributes:
        tokens: [T] ids.
        drafts: [T][k] ids drafted when token t is the last known one (for t >= 1).
        probs: [T][k] the draft's own probability of each.
    """

    prompt: int
    tokens: list[int]
    drafts: list[list[int]]
    probs: list[list[float]]

    def matches(self, last: int) -> int:
        """How many drafts after token `last` agree with the text."""
        count = 0
        for draft, token in zip(self.drafts[last], self.tokens[last + 1 :], strict=False):
            if draft != token:
                break
            count += 1
        return count


@torch.inference_mode()
def draft_steps(
    model: LingReference, tokens: Tensor, steps: int, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Drafts of all positions.

    Args:
        tokens: [B, T], padded on the right.
        steps: draft tokens k.
        allowed: ids that the draft head holds, None for the whole vocabulary.

    Returns:
        drafts [B, T, k] int64 and their probabilities [B, T, k]; slot t is drafted when token t is the last known one,
        slot 0 is meaningless (the layer needs a hidden state before it).
    """
    layer = model.mtp_layer()
    hidden = model.hidden(tokens)[:, :-1]
    fed = tokens[:, 1:]
    earlier: list[tuple[Tensor, Tensor]] = []
    drafts, probs = [], []
    for _ in range(steps):
        hidden = layer.draft_step(model.model.word_embeddings(fed).float(), hidden, earlier)
        logits = model.logits(hidden)
        if allowed is not None:
            logits = logits[..., allowed]
        prob, index = logits.softmax(-1).max(-1)
        fed = index if allowed is None else allowed[index]
        drafts.append(fed)
        probs.append(prob)
    pad = (0, 0, 1, 0)
    return (
        torch.nn.functional.pad(torch.stack(drafts, -1), pad),
        torch.nn.functional.pad(torch.stack(probs, -1), pad),
    )


def traces(
    model: LingReference,
    prompts: list[list[int]],
    outputs: list[list[int]],
    steps: int,
    allowed: Tensor | None = None,
    batch: int = 32,
) -> list[Trace]:
    """Traces of finished texts."""
    found = []
    for part in _batches(list(zip(prompts, outputs, strict=True)), batch):
        texts = [prompt + output for prompt, output in part]
        width = max(map(len, texts))
        padded = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        drafts, probs = draft_steps(model, padded, steps, allowed)
        for row, ((prompt, _), text) in enumerate(zip(part, texts, strict=True)):
            found.append(
                Trace(len(prompt), text, drafts[row, : len(text)].tolist(), probs[row, : len(text)].tolist())
            )
    return found


@torch.inference_mode()
def sample(
    model: LingReference,
    prompts: list[list[int]],
    tokens: int,
    temperature: float,
    seed: int,
    batch: int = 32,
) -> list[list[int]]:
    """`tokens` tokens after each prompt; temperature 0 is greedy. No stop token ends a text."""
    generator = torch.Generator().manual_seed(seed)
    outputs: list[list[int]] = []
    for part in _batches(prompts, batch):
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in part])
        mask = torch.arange(width) >= width - torch.tensor([[len(p)] for p in part])
        cache, produced = Cache(), []
        for _ in range(tokens):
            logits = model.logits(model.hidden(ids, cache, mask)[:, -1])
            if temperature:
                chances = (logits / temperature).softmax(-1)
                ids = torch.multinomial(chances, 1, generator=generator)
            else:
                ids = logits.argmax(-1, keepdim=True)
            mask = torch.ones_like(ids, dtype=torch.bool)
            produced.append(ids)
        outputs += torch.cat(produced, 1).tolist()
    return outputs


def _batches(items: list[Any], size: int) -> Iterable[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
