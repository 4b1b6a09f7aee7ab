# SPDX-License-Identifier: Apache-2.0
"""Which whole-step CUDA graphs attend with our kernels alone, and so read no schedule that vLLM computes in every step.

The V2 runner prepares a batch of a size and then captures the graph of that size; `preparing` hears the one, `note` the
other, from the models' own forward passes. A size that is captured again (vLLM first measures the memory of its graphs)
counts as what it was captured as last.
"""

from typing import Any

import torch

Size = tuple[int, int]  # tokens and sequences, padding included
_graphs: dict[str, dict[Size, bool]] = {"target": {}, "draft": {}}
_prepared: Size | None = None


def preparing(tokens: int, sequences: int) -> None:
    """A batch of this size is prepared for a capture."""
    global _prepared
    _prepared = tokens, sequences


def note(model: str, tokens: int, built: Any) -> None:
    """A forward pass of `model` ("target" or "draft"); `built` is its fused path, or None where vLLM's layers run."""
    if _prepared is None or _prepared[0] != tokens or not torch.cuda.is_current_stream_capturing():
        return
    _graphs[model][_prepared] = built is not None and built.body.attends_alone(tokens)


def problem(size: Size) -> str:
    """Why graphs of this size need vLLM's attention plans in every step, or ""."""
    if not _graphs["target"].get(size, False):
        return "no graph of the target holds our attention alone"
    if _graphs["draft"] and not _graphs["draft"].get(size, False):
        return "the draft's first step reads vLLM's plan"
    return ""


def forget() -> None:
    """As in a new process."""
    global _prepared
    _prepared = None
    for graphs in _graphs.values():
        graphs.clear()
