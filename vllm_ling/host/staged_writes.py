# SPDX-License-Identifier: Apache-2.0
"""The sampler's tables are sent to the GPU when a request changed them, not in every step.

vLLM's V2 sampler keeps a dozen small tables (temperatures, seeds, penalties, biases, ...), one row per request, and
copies each into the next of its pinned buffers in every step. Only `add_request` writes rows. Between two requests the
copy that the GPU reads is therefore the one that is there: a buffer is written only when its turn in the pool comes.
"""

from typing import Any

from vllm_ling.status import choose

_WHAT = "sampler tables"
# The parts whose `apply_staged_writes` sends what `add_request` staged and nothing else.
_KNOWN = ("LogitBiasState", "PenaltiesState", "BadWordsState")


def keep_sent(sampler: Any) -> None:
    """Makes this sampler (vLLM's V2 `Sampler`) send its tables after `add_request` only; others see no change."""
    if reason := problem(sampler):
        choose(_WHAT, "every step", reason)
        return
    add, send = sampler.add_request, sampler.apply_staged_writes
    waiting = True  # what was staged before now

    def add_request(*args: Any, **kwargs: Any) -> None:
        nonlocal waiting
        waiting = True
        add(*args, **kwargs)

    def apply_staged_writes() -> None:
        nonlocal waiting
        if waiting:
            send()
            waiting = False  # not before: a send that fails is tried again

    sampler.add_request, sampler.apply_staged_writes = add_request, apply_staged_writes
    choose(_WHAT, "new requests", "nothing else changes them")


def problem(sampler: Any) -> str:
    """Why the tables have to be sent in every step, or ""."""
    if type(sampler).__name__ != "Sampler" or not type(sampler).__module__.startswith("vllm."):
        return f"the sampler is {type(sampler).__name__}, which may stage more"
    try:
        parts = [type(part) for part in sampler.logits_processors]
        replayed = sampler.trace_replay_state is not None
        sampler.sampling_states, sampler.thinking_budget_state, sampler.logprob_token_ids_state  # noqa: B018
    except AttributeError as error:
        return f"vLLM's sampler has changed: {error}"
    if replayed:
        return "a trace is replayed"
    if tuple(part.__name__ for part in parts) != _KNOWN or any(
        not part.__module__.startswith("vllm.") for part in parts
    ):
        return f"its logits processors are {', '.join(part.__name__ for part in parts) or 'none'}"
    return ""
