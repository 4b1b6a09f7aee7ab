# SPDX-License-Identifier: Apache-2.0
"""Records what passes through a served model: the residual stream after some layers, final hidden states, logits.

Layers that vLLM calls are hooked. A path that bypasses them hands its residual stream over itself, through the model's
`ling_taps` (a dict that it fills: layer -> BF16 [tokens, hidden]). Both need eager execution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Steps of more tokens are prefill: their logits are not kept.
_DECODE_TOKENS = 32


@dataclass
class Step:
    """One forward pass of the model.

    Attributes:
        tokens, positions: int64 [tokens].
        taps: name ("5" is after layer 5, "final" after the last norm) -> [tokens, hidden].
        logits: [tokens, vocabulary], None for prefill.
        fused: whether the decode path bypassed vLLM's layers.
    """

    tokens: Tensor
    positions: Tensor
    taps: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    fused: bool = False


class Recorder:
    """Hooks a model until `stop`; `steps` grows with every forward pass.

    Args:
        layers: after which layers the residual stream is kept.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.steps: list[Step] = []
        self._model, self._layers = model, layers
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]
        for index in layers:
            layer = model.model.layers[index]
            self._hooks.append(
                layer.register_forward_hook(lambda _m, _i, out, index=index: self._after_layer(index, out))
            )

    def take(self) -> list[Step]:
        """The steps so far, which are forgotten."""
        found, self.steps = self.steps, []
        return found

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        if hasattr(self._model, "ling_taps"):
            self._model.ling_taps = None

    def _begin(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        # The runner reuses both buffers.
        self._now = Step(named["input_ids"].to("cpu", copy=True), named["positions"].to("cpu", copy=True))
        if hasattr(self._model, "ling_taps"):
            self._model.ling_taps = {}

    def _after_layer(self, index: int, output: Any) -> None:
        hidden, residual = output
        self._now.taps[str(index)] = (hidden.float() + residual.float()).to(hidden.dtype).cpu()

    def _end(self, model: Any, _inputs: Any, output: Tensor) -> None:
        own = getattr(model, "ling_taps", None)
        if own:
            self._now.fused = True
            self._now.taps |= {str(index): own[index].cpu() for index in self._layers}
        self._now.taps["final"] = output.cpu()
        if len(output) <= _DECODE_TOKENS:
            self._now.logits = model.compute_logits(output).cpu()
        self.steps.append(self._now)


def gather(steps: Sequence[Step], texts: dict[int, list[int]], lanes: int) -> dict[int, dict[int, "Row"]]:
    """Sorts what was recorded by sequence and position.

    A sequence lies in one piece in a batch, and its first token there is one that was emitted: it names the text by its
    lane (id modulo `lanes`). Rejected drafts are not the text's tokens; they and what follows them in the same piece
    depend on a wrong token and are left out. Later passes replace earlier ones.
    """
    found: dict[int, dict[int, Row]] = {lane: {} for lane in texts}
    for step in steps:
        current, right, before = -1, False, -2
        for index, (token, position) in enumerate(
            zip(step.tokens.tolist(), step.positions.tolist(), strict=True)
        ):
            lane = token % lanes
            known = lane in texts and position < len(texts[lane]) and texts[lane][position] == token
            if position != before + 1 or (known and lane != current):
                current, right = lane, known
            right = right and known and lane == current
            before = position
            if right:
                found[lane][position] = Row(step, index)
    return found


@dataclass(frozen=True)
class Row:
    """One token of a step."""

    step: Step
    index: int

    def tap(self, name: str) -> Tensor | None:
        """Its hidden state, or its logits under the name "logits"; None where they were not kept."""
        source = self.step.logits if name == "logits" else self.step.taps.get(name)
        return None if source is None else source[self.index]
