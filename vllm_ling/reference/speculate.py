# SPDX-License-Identifier: Apache-2.0
"""Accept length of MTP drafts under greedy verification, computed without running a speculative loop.

With greedy verification the output equals greedy decoding, and a draft only matters up to its first wrong
token. So one teacher-forced rollout over the finished text tells, for every position, how many drafts would
be accepted there; walking the text in steps of 1 + accepted replays the rounds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_ling.reference.model import LingReference


@dataclass(frozen=True)
class Speculation:
    """rounds: verify steps after the prefill's token; tokens: emitted in them; accepted: drafts."""

    rounds: int
    tokens: int
    accepted: int

    @property
    def accept_length(self) -> float:
        """Tokens emitted per verify step, between 1 and k + 1; 1.0 if there was none."""
        return self.tokens / self.rounds if self.rounds else 1.0


@torch.inference_mode()
def matching_drafts(model: LingReference, tokens: Tensor, drafts: int) -> Tensor:
    """How many of `drafts` draft tokens made after token i + 1 agree with `tokens`: [B, T] int64, 0 to k.

    tokens: [B, T], padded on the right with any id.
    """
    steps = model.mtp_rollout(tokens, model.hidden(tokens), drafts)
    agree = torch.zeros(drafts, *tokens.shape, dtype=torch.long, device=tokens.device)
    for step, hidden in enumerate(steps):
        later = tokens[:, 2 + step :]
        agree[step, :, : later.shape[1]] = model.logits(hidden).argmax(-1)[:, : later.shape[1]] == later
    return agree.cumprod(0).sum(0)


def speculate(
    model: LingReference, prompts: list[list[int]], outputs: list[list[int]], drafts: int
) -> Speculation:
    """Replays speculative decoding with k = `drafts` over greedy `outputs` (as `generate` returns them).

    A round emits its accepted drafts plus the target's own token, cut where the output ends, as a server
    counts it.
    """
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    width = max(map(len, texts))
    device = model.lm_head.weight.device
    matches = matching_drafts(
        model, torch.tensor([t + [0] * (width - len(t)) for t in texts], device=device), drafts
    ).tolist()
    rounds = tokens = accepted = 0
    for prompt, text, row in zip(prompts, texts, matches, strict=True):
        last = len(prompt)
        while last < len(text) - 1:
            hits = min(row[last - 1], len(text) - 1 - last)
            emitted = min(hits + 1, len(text) - 1 - last)
            rounds, tokens, accepted = rounds + 1, tokens + emitted, accepted + hits
            last += emitted
    return Speculation(rounds, tokens, accepted)
