# SPDX-License-Identifier: Apache-2.0
"""Which path a batch takes. Pure policy: no tensors, no kernels, no logging."""

from dataclasses import dataclass
from typing import Any, Literal

Path = Literal["fused", "layers"]


def one_gpu(parallel: Any) -> bool:
    """Whether vLLM's `parallel_config` asks for a single rank: the fused path serves no other."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.data_parallel_size
    return bool(ranks == 1)


@dataclass(frozen=True)
class BatchFacts:
    """What the decision rests on.

    Attributes:
        tokens: tokens of the batch, padding included.
        most: the most that the kernels take.
        planned: vLLM has planned the batch's attention (false in its profiling runs).
        prefills: sequences that read a prompt.
        mixed: plain decodes beside verified drafts.
        longest: tokens of the longest sequence.
        pieces: vLLM captures or replays graphs of pieces of its compiled model; the fused path is no part of them.
        unusual: what else speaks against the fused path (embeddings from outside, a state of another type), or "".
    """

    tokens: int
    most: int
    planned: bool = True
    prefills: int = 0
    mixed: bool = False
    longest: int = 1
    pieces: bool = False
    unusual: str = ""


def choose_path(facts: BatchFacts) -> tuple[Path, str]:
    """Returns (path, reason); every reason names a kind of batch, so that each is logged once."""
    rules: tuple[tuple[bool, str], ...] = (
        (bool(facts.unusual), facts.unusual),
        (not facts.planned, "profiling runs have no attention plan"),
        (facts.pieces, "the batch goes through piecewise graphs"),
        (facts.prefills > 0, "a prompt is read"),
        (facts.mixed, "plain decodes beside verified drafts"),
        (facts.tokens > facts.most, f"more than {facts.most} tokens"),
        (facts.longest > facts.most, f"more than {facts.most} tokens of a sequence"),
    )
    for holds, reason in rules:
        if holds:
            return "layers", reason
    return "fused", f"decode and verification of up to {facts.most} tokens"
