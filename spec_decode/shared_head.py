# SPDX-License-Identifier: Apache-2.0
"""The draft's output head is the target's head module object: placeholder until bound, proof when bound.

The failure this guards against: a draft that takes the bytes of an FP8 head without its module reads them as BF16,
drafts noise and makes serving slower, with no error anywhere. Both of vLLM's model runners assign the target's module
to `shared_head.head` after loading the draft; that assignment is the moment of proof, so nothing has to be patched.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_ling.errors import LingError
from vllm_ling.spec_decode.draft_rows import DraftRows
from vllm_ling.spec_decode.faults import broken_head
from vllm_ling.status import fault, proof

_target_heads: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_drafts: "weakref.WeakSet[SharedHead]" = weakref.WeakSet()
_PROBE_ROWS = 8
_CHECKED_ROWS = 8192  # of the weight at a time; as booleans they stay small beside it


def register_target_head(head: nn.Module) -> None:
    """Notes the head of a target model in this process; the proof compares against these objects."""
    _target_heads.add(head)


def head_changed(head: nn.Module) -> None:
    """Called when a head's weights are final, after loading and after every reload: copies of its rows are renewed."""
    for draft in list(_drafts):
        if draft.head is head:
            draft.take_rows()


class UnboundHeadMethod(QuantizeMethodBase):
    """Method of a draft head before sharing: no vocabulary rows, and NaN in what there is."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        layer.register_parameter("weight", nan_weight(layer))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise LingError("MTP: the draft head was never bound to the target's head; drafting would be noise")


def nan_weight(layer: Any) -> Parameter:
    """A single NaN row [1, hidden]: reading it by mistake cannot look like a prediction."""
    weight: Any = Parameter(torch.full((1, layer.embedding_dim), torch.nan), requires_grad=False)
    weight.ling_computed = True  # never filled from a checkpoint
    return weight


def unbind(head: Any) -> None:
    """Turns a freshly built draft head into the unbound placeholder, dropping any full-size weight."""
    for name in list(head._parameters):
        delattr(head, name)
    head.register_parameter("weight", nan_weight(head))
    head.quant_method = UnboundHeadMethod()


class SharedHead(nn.Module):
    """Holds the MTP layer's reference to the output head; replaces upstream's container of the same role.

    Args:
        placeholder: the unbound head.
        fail: raise on a violated proof; otherwise record the fault and carry on.
        inject: break the head on purpose (see `faults`).
        rows: subset of the vocabulary to draft from, None for all of it.
    """

    def __init__(
        self, placeholder: nn.Module, *, fail: bool, inject: str, rows: DraftRows | None = None
    ) -> None:
        super().__init__()
        self._fail = fail
        self._inject = inject
        self._proven = False
        self.rows = rows
        self.head = placeholder
        _drafts.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        bound = isinstance(value, nn.Module) and not isinstance(value.quant_method, UnboundHeadMethod)
        if name != "head" or not bound:
            super().__setattr__(name, value)
            return
        super().__setattr__(name, value if self._inject == "none" else broken_head(value, self._inject))
        self.prove()
        self.take_rows()

    def take_rows(self) -> None:
        """Gathers the draft's rows from the head, if there is a subset and the head is proven to be the target's."""
        if self.rows is None:
            return
        if self._proven:
            self.rows.gather(self.head)
        else:
            self.rows.decline("the draft's head is not proven to be the target's")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Identity, as upstream: the final norm is part of the MTP layer."""
        return hidden_states

    def prove(self) -> None:
        """Checks the bound head against the target's.

        Raises:
            LingError: naming what is wrong, unless faults are only to be recorded.
        """
        problem = find_problem(self.head, list(_target_heads))
        self._proven = problem is None
        if problem is None:
            proof("draft_head", f"the draft's head is the target's module object ({_describe(self.head)})")
            return
        code, message = problem
        fault(code, message)
        if self._fail:
            raise LingError(f"{message}; start without speculation, or with ling.on_fault=warn to look at it")


def find_problem(head: Any, targets: list[Any]) -> tuple[str, str] | None:
    """The first violated property of a draft head as (code, message), or None."""
    path = "model.layers.N.shared_head.head"
    if not targets:
        return "draft_head_no_target", f"{path}: this process has no target head to share"
    target = targets[-1]
    if not any(head is candidate for candidate in targets):
        if head.weight.dtype != target.weight.dtype:
            difference = f"{head.weight.dtype} instead of {target.weight.dtype}"
        else:
            difference = "another module"
        message = (
            f"{path} is not the target's lm_head module ({difference}); on the same {_PROBE_ROWS} hidden states its "
            f"logits {_probe(head, target)}. Acceptance cannot be trusted to show this"
        )
        return "draft_head_not_shared", message
    weight = head.weight
    row = _first_bad_row(weight)
    if row is not None:
        return "draft_head_nan", f"{path}.weight holds NaN or Inf in row {row}"
    if weight.dtype == torch.float8_e4m3fn:
        return _scale_problem(head, path)
    return None


def _first_bad_row(weight: torch.Tensor) -> int | None:
    """The first row with a NaN or Inf; one such row wins every argmax, or none."""
    for begin in range(0, weight.shape[0], _CHECKED_ROWS):
        part = weight[begin : begin + _CHECKED_ROWS]
        if part.dtype == torch.float8_e4m3fn:
            bad = (part.view(torch.uint8) & 0x7F == 0x7F).any(-1)  # E4M3 has no infinity
        else:
            bad = ~torch.isfinite(part).all(-1)
        if bool(bad.any()):
            return begin + int(bad.nonzero()[0])
    return None


def _scale_problem(head: Any, path: str) -> tuple[str, str] | None:
    rows, hidden = head.weight.shape
    for name, size in (("weight_scale", (rows,)), ("weight_scale_inv", (-(-rows // 128), -(-hidden // 128)))):
        scale = getattr(head, name, None)
        if scale is None:
            continue
        if tuple(scale.shape) != size:
            return "draft_head_scale_shape", f"{path}.{name} is {tuple(scale.shape)}, expected {size}"
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            return "draft_head_scale", f"{path}.{name} holds values that are not positive numbers"
        return None
    return "draft_head_no_scale", f"{path}.weight is FP8 without a scale"


def _probe(head: Any, target: Any) -> str:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_ROWS, target.embedding_dim, generator=generator, dtype=torch.float32)
    dtype = torch.bfloat16 if target.weight.dtype == torch.float8_e4m3fn else target.weight.dtype
    hidden = hidden.to(device=target.weight.device, dtype=dtype)
    ours, theirs = (h.quant_method.apply(h, hidden).float() for h in (head, target))
    if torch.equal(ours, theirs):
        return "are bit-equal, so a second copy is being read"
    # Rows that a broken head does not have come back as -1e30; they say nothing about the size of the error.
    real = ours > -1e29
    error = float(((ours - theirs)[real].square().mean() / theirs[real].square().mean()).sqrt())
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return f"differ by {error:.2g} times their size, with the same best token in {same} of {_PROBE_ROWS}"


def _describe(head: Any) -> str:
    return f"{type(head.quant_method).__name__}, {str(head.weight.dtype).removeprefix('torch.')}"
