# SPDX-License-Identifier: Apache-2.0
"""The draft's view of the shared head when it may propose a subset of the vocabulary: gathered rows, full ids back.

Verification keeps the full head, so a short list costs acceptance and never changes the output. Of Ling-3.0-flash's
157,184 FP8 rows, 32,768 are 84 MB: the only memory this adds, and what a draft step then reads in place of 403 MB.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from vllm_ling.status import choose


class DraftRows:
    """Some rows of a head in a small layer of their own, served by a method of the head's kind.

    Not a module of the draft: nothing here comes from a checkpoint, so no loader may look for it.

    Args:
        ids: tokens that may be drafted, ascending.
        source: where they come from, for the log.
    """

    def __init__(self, ids: list[int], source: str) -> None:
        self._ids, self._source = torch.tensor(ids), source
        self._layer: Any = None

    @property
    def active(self) -> bool:
        """Whether the draft reads these rows and not the full head."""
        return self._layer is not None

    def gather(self, head: Any) -> None:
        """Takes the rows from `head`; again after a reload, into the same memory, which CUDA graphs point to."""
        self._ids = self._ids.to(head.weight.device)
        found = head.quant_method.gather(head, self._ids)
        size, full = _bytes(found), _bytes(dict(head.named_parameters()))
        if size >= full:
            self.decline(
                f"{len(self._ids)} rows without their block scales are {size / 1e6:.1f} MB, the head {full / 1e6:.1f}"
            )
            return
        if self._layer is None:
            self._layer = nn.Module()
            self._layer.quant_method = head.quant_method.for_rows()
            self._layer.tp_size = 1
        for name, tensor in found.items():
            old = getattr(self._layer, name, None)
            if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
                old.data.copy_(tensor)
            else:
                setattr(self._layer, name, Parameter(tensor, requires_grad=False))
        self._layer.quant_method.process_weights_after_loading(self._layer)
        choose(
            "draft_vocab",
            f"{len(self._ids)} of {head.weight.shape[0]} rows",
            f"{self._source}: gathered from the shared head into {size / 1e6:.1f} MB more memory; a draft step reads "
            f"these in place of {full / 1e6:.1f} MB",
        )

    def decline(self, reason: str) -> None:
        """Leaves the draft with the full head."""
        self._layer = None
        choose("draft_vocab", "full head", reason)

    def logits(self, processor: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits [tokens, vocab] of `hidden` [tokens, hidden], -inf for tokens outside the list.

        Both runners index draft logits by full token ids (argmax, temperature, cached proposals, acceptance estimates),
        so a full-size tensor serves them all. Per token it costs 2 bytes x 157,184 = 0.3 MB written and two small
        launches, against 319 MB of head that 32,768 rows leave unread: 0.1% of the saving. `top_tokens` does without.
        """
        few = processor(self._layer, hidden)
        full = few.new_full((*few.shape[:-1], processor.org_vocab_size), -torch.inf)
        return full.index_copy_(-1, self._ids, few)

    def top_tokens(self, processor: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Best token ids [tokens] of `hidden` [tokens, hidden]; of equal logits the lowest id, as in the full head."""
        best = processor(self._layer, hidden).argmax(-1)
        return self._ids[best]


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
