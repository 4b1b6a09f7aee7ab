# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the V2 runner for every draft length, and which lengths they cover.

A FULL graph replays batches whose requests all have one number of tokens, by default k + 1; a shorter batch would run
without a graph, which costs more than it saves. vLLM captures further lengths for its draft lengths by batch size
(`num_speculative_tokens_per_batch_size`), those that occur in that table. The gate may take any, so where the capture
reads the table it is given one with all of them (see `compat.WORKAROUNDS`).
"""

import importlib
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

_READERS = (
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils",
)
_NAME = "build_dynamic_sd_schedule_lookup"


def every_length(schedule: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int) -> list[int]:
    """In place of vLLM's table from batch size to draft tokens: all lengths, from 0 on; its first entry is unused."""
    del schedule, vllm_max_batch_size
    return [0, *range(vllm_num_speculative_tokens + 1)]


def capture_every_length() -> None:
    """Lets this process capture target and draft graphs of every length.

    Raises:
        AttributeError: vLLM reads its table elsewhere now.
    """
    modules = [importlib.import_module(name) for name in _READERS]
    for module in modules:
        getattr(module, _NAME)
    for module in modules:
        setattr(module, _NAME, every_length)


def covered_lengths(managers: list[Any], most: int) -> Callable[[int], Collection[int] | None]:
    """Draft tokens 0 to `most` that a number of requests may share: those for which all `managers` have a FULL graph.

    None where no length has one: such a batch runs without a graph whatever its lengths.
    """

    @cache
    def lengths(requests: int) -> Collection[int] | None:
        found = [
            length
            for length in range(most + 1)
            if all(_full(m.dispatch(requests, requests * (length + 1), length + 1, 0)) for m in managers)
        ]
        return found or None

    return lengths


def covered_steps(manager: Any, most: int) -> Callable[[int], Collection[int] | None]:
    """Draft steps 1 to `most` of a number of requests whose later steps have a FULL graph; None where none has one."""

    @cache
    def steps(requests: int) -> Collection[int] | None:
        one = manager.dispatch(requests, requests, 1, 0)
        found = [
            number for number in range(2, most + 1) if _full(manager.specialize_spec_tokens(one, number))
        ]
        return [1, *found] if found else None

    return steps


def _full(description: Any) -> bool:
    return bool(description.cg_mode.name == "FULL")
