# SPDX-License-Identifier: Apache-2.0
"""Greedy drafts need the best token of the head, not its logits: who computes which."""

from typing import Any


def choose_draft_argmax(draft: Any, tensor_parallel: int, cuda: bool, gate: bool) -> tuple[bool, str]:
    """Whether vLLM should ask the draft for its best tokens (`use_local_argmax_reduction`), and why.

    Args:
        draft: vLLM's speculative config; its own setting is kept where it is on.
        tensor_parallel: ranks that the head is spread over.
        cuda: on an NVIDIA GPU.
        gate: whether ling.draft_gate is on.
    """
    if draft.use_local_argmax_reduction:
        return True, "use_local_argmax_reduction"
    if not cuda:
        return False, "no NVIDIA GPU"
    if tensor_parallel > 1:
        return False, "the head is spread over several GPUs"
    if draft.draft_sample_method != "greedy":
        return False, f"draft_sample_method={draft.draft_sample_method} needs the logits"
    if gate:
        return False, "ling.draft_gate needs the drafts' probabilities"
    if getattr(draft, "enable_adaptive_verification", False):
        return False, "enable_adaptive_verification needs the logits"
    return True, "greedy drafts: the head's logits need not be written"
