# SPDX-License-Identifier: Apache-2.0
"""Now and then a step that keeps its attention plans has them built after all, to see that nothing had to change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_ling.host.kept_plans import PLAIN, SPEC
from vllm_ling.status import fault, proof

_CODE = "kept_plans"
_EVERY = 4096  # kept steps between two comparisons, which wait for the GPU; the first ones follow sooner


class PlansCheck:
    """Which kept steps are compared, and what came out."""

    def __init__(self) -> None:
        self._kept, self._next, self._proven = 0, 1, False

    def due(self) -> bool:
        """Counts a kept step; true for the 1st, 2nd, 4th, 8th and so on, later for every `_EVERY`th."""
        self._kept += 1
        if self._kept < self._next:
            return False
        self._next += min(self._next, _EVERY)
        return True

    def compare(
        self, builders: Sequence[Any], build: Callable[[], dict[str, Any]]
    ) -> tuple[Mapping[str, Any], str]:
        """vLLM's plans of the step, and what is wrong with what was kept, or "". Recorded as proof or fault.

        Args:
            builders: of KDA's and MLA's plans; graphs read the former's buffers.
            build: builds the plans into those buffers.
        """
        held = [_copies(builder) for builder in builders]
        plans = build()
        spec = any(getattr(plan, "spec_sequence_masks", None) is not None for plan in plans.values())
        wrong = {
            name
            for builder, before in zip(builders, held, strict=True)
            for name in (SPEC if spec else PLAIN)
            if name in before and not torch.equal(before[name], getattr(builder, name))
        }
        if not wrong:
            if not self._proven:
                self._proven = True
                proof(
                    _CODE, "what a step found in the buffers of its attention plans is what vLLM builds anew"
                )
            return plans, ""
        reason = f"kept step {self._kept} found {', '.join(sorted(wrong))} of an earlier one"
        fault(
            _CODE,
            f"{reason}; tokens of the steps before it may be wrong. From now on plans are built in every step",
        )
        return plans, reason


def _copies(builder: Any) -> dict[str, torch.Tensor]:
    found = {name: getattr(builder, name, None) for name in (*SPEC, *PLAIN)}
    return {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}
