# SPDX-License-Identifier: Apache-2.0
"""Compares the greedy answers of engines with those of the fp32 reference, up to near ties. Little models only."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.model import LingReference
from vllm_ling.reference.speculate import speculate
from vllm_ling.tiny.evaluate import MAX_NEW_TOKENS, load_heldout
from vllm_ling.tiny.problems import final_number
from vllm_ling.tiny.tokenizer import EOS, PAD, render_chat, token_id


@dataclass(frozen=True)
class Divergence:
    """The first place where an answer leaves the reference's.

    Attributes:
        gap: how far the reference puts the token below its own, in logits; infinite where the answer just ends.
    """

    prompt: int
    position: int
    gap: float


class TinyAnswers:
    """The reference's answers of tiny-ling to held-out problems, and its logits at every token of them."""

    def __init__(self, items: int) -> None:
        folder = tiny_ling_path()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.items = load_heldout(items)
        self.prompts = [self.tokenizer.encode(render_chat(item["question"])).ids for item in self.items]
        self.stop = [token_id(self.tokenizer, name) for name in (EOS, PAD)]
        self._model: LingReference = from_checkpoint(folder)
        self.tokens = self._model.generate(self.prompts, MAX_NEW_TOKENS, frozenset(self.stop))
        self.logits = [self._logits(*pair) for pair in zip(self.prompts, self.tokens, strict=True)]

    @torch.inference_mode()
    def _logits(self, prompt: list[int], answer: list[int]) -> Tensor:
        return self._model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]

    def accept_length(self, drafts: int) -> float:
        """Of the reference's own drafts."""
        return speculate(self._model, self.prompts, self.tokens, drafts).accept_length

    def exact_match(self, answers: Sequence[list[int]]) -> float:
        """Share of answers with the right number."""
        right = sum(
            final_number(self.tokenizer.decode(answer)) == final_number(item["answer"])
            for answer, item in zip(answers, self.items, strict=True)
        )
        return right / len(self.items)

    def divergences(self, answers: Sequence[list[int]]) -> list[Divergence]:
        """Where answers leave the reference's."""
        return divergences(answers, self.tokens, self.logits)

    def distance(
        self, tops: Sequence[Sequence[Sequence[tuple[int, float]]]], answers: Sequence[list[int]]
    ) -> float:
        """Relative RMS distance of the best raw logits per token from the reference's, while both agree."""
        error = size = 0.0
        for found, answer, exact, logits in zip(tops, answers, self.tokens, self.logits, strict=True):
            for position, row in enumerate(found[: len(exact)]):
                if answer[:position] != exact[:position]:
                    break
                for token, value in row:
                    right = float(logits[position, token])
                    error, size = error + (value - right) ** 2, size + right**2
        return (error / size) ** 0.5 if size else float("nan")


def divergences(
    answers: Sequence[list[int]], exact: Sequence[list[int]], logits: Sequence[Tensor]
) -> list[Divergence]:
    """The first difference of each answer, judged by the reference's logits [tokens, vocabulary] of that answer."""
    found = []
    for number, (answer, right, rows) in enumerate(zip(answers, exact, logits, strict=True)):
        if answer == right:
            continue
        shorter = min(len(answer), len(right))
        first = next((n for n in range(shorter) if answer[n] != right[n]), shorter)
        gap = float("inf")
        if first < shorter:
            gap = float(rows[first, right[first]] - rows[first, answer[first]])
        found.append(Divergence(number, first, gap))
    return found
