# SPDX-License-Identifier: Apache-2.0
"""A decode step that asks the same as the last one keeps its attention plans.

vLLM builds the plan of every KV cache group anew in each step. A whole-step CUDA graph reads none of it but the buffers
that the plans were staged in, and where the step has the same requests, sizes and blocks as the last one they would be
filled with what is in them. What does change from step to step is left: positions, lengths and slots, which the runner
fills itself; the numbers of accepted drafts (`accepted`); and FlashAttention's schedule, which graphs of our attention
do not read (`captured`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

# Buffers of a KDA plan that a graph reads: with drafts to verify, and without.
SPEC = (
    "spec_state_indices_tensor",
    "spec_sequence_masks",
    "spec_token_indx",
    "spec_query_start_loc",
    "num_accepted_tokens",
)
PLAIN = ("non_spec_state_indices_tensor", "non_spec_query_start_loc")


def key_of(batch: Any, num_blocks: np.ndarray, state_block: int, slack: int) -> tuple[Any, ...] | None:
    """What the plans of this batch (vLLM's `InputBatch`) depend on, but its lengths; None where that cannot be told.

    Args:
        num_blocks: int32 [groups, slots], blocks of each request so far; appending to them changes it.
        state_block: tokens of a block of KDA states where the state in use moves from block to block, else 0.
        slack: how far the CPU's lengths may be above the GPU's, which alone knows what was accepted.
    """
    if batch.has_prefill or batch.max_query_len is not None:  # a promised length: adaptive verification
        return None
    if batch.dcp_local_seq_lens is not None or getattr(batch, "pcp", None) is not None:
        return None
    slots, drafts = batch.idx_mapping_np, batch.num_draft_tokens_per_req
    column = b""
    if state_block:
        longest = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        last = (longest - 1) // state_block
        if ((np.maximum(longest - slack, 1) - 1) // state_block != last).any():
            return None
        column = last.tobytes()
    return (
        batch.num_tokens_after_padding,
        batch.num_reqs_after_padding,
        slots.tobytes(),
        batch.num_scheduled_tokens.tobytes(),
        None if drafts is None else drafts.tobytes(),
        num_blocks[:, slots].tobytes(),
        column,
    )


def accepted(
    plans: dict[str, Any], batch: Any, block_tables: Sequence[torch.Tensor], groups: Sequence[Any]
) -> tuple[list[torch.Tensor], str]:
    """The buffers int32 [requests] that the accepted drafts go to, or why graphs read more than vLLM's own buffers.

    Args:
        plans: what vLLM built for `batch`, by layer.
        block_tables: of the batch, one per group.
        groups: vLLM's `AttentionGroup`s.
    """
    builders = [builder for group in groups for builder in group.metadata_builders]
    tables = [*block_tables, *(table for group in groups if (table := group.kernel_block_table) is not None)]
    known: dict[int, Any] = {id(plan): plan for plan in plans.values()}
    found: dict[int, torch.Tensor] = {}
    for plan in known.values():
        if hasattr(plan, "spec_sequence_masks"):
            spec = plan.spec_sequence_masks is not None
            if plan.num_prefills or (spec and plan.num_decodes):
                return [], "a sequence is no decode"
            for name in SPEC if spec else PLAIN:
                if not _one_of(getattr(plan, name), [getattr(builder, name, None) for builder in builders]):
                    return [], f"{name} of a KDA plan lies outside vLLM's buffers"
            if spec:
                numbers = plan.num_accepted_tokens[: batch.num_reqs]
                found[numbers.data_ptr()] = numbers
        elif getattr(plan, "decode", None) is not None and not plan.num_prefills:
            decode = plan.decode
            if not (
                _one_of(decode.block_table, tables)
                and _one_of(decode.seq_lens, [batch.seq_lens])
                and _one_of(plan.query_start_loc, [batch.query_start_loc])
            ):
                return [], "an MLA plan holds copies"
        else:
            return [], f"{type(plan).__name__} is not known"
    return list(found.values()), ""


def _one_of(tensor: torch.Tensor | None, places: Sequence[torch.Tensor | None]) -> bool:
    """Whether `tensor` begins where one of `places` does."""
    if tensor is None:
        return False
    return any(place is not None and place.data_ptr() == tensor.data_ptr() for place in places)


class LazyPlans(dict[str, Any]):
    """The plans of a step whose graph needs none: built by vLLM if anything looks at them."""

    def __init__(self, build: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._build: Callable[[], dict[str, Any]] | None = build

    def _filled(self) -> "LazyPlans":
        if self._build is not None:
            build, self._build = self._build, None
            super().update(build())
        return self

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self._filled(), name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict; so are the others."""
        return dict.get(self._filled(), name, default)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self._filled(), name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._filled())

    def __len__(self) -> int:
        return dict.__len__(self._filled())

    def keys(self) -> Any:
        """See `get`."""
        return dict.keys(self._filled())

    def values(self) -> Any:
        """See `get`."""
        return dict.values(self._filled())

    def items(self) -> Any:
        """See `get`."""
        return dict.items(self._filled())
