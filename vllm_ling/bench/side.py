# SPDX-License-Identifier: Apache-2.0
"""What one engine of `vllm-ling bench decode` is asked to do, and what comes back of it."""

from dataclasses import dataclass, field
from typing import Any

from vllm_ling.bench.host import Host
from vllm_ling.bench.trace import Steps, read_steps

PREFILL, BATCH = 8192, 32


@dataclass(frozen=True)
class Side:
    """One engine to time.

    Attributes:
        options: the `ling` section of additional_config; None is stock vLLM without the plugin.
        model, layers: see `engine.model_folder`.
        contexts: prompt lengths in tokens.
        draft_tokens, accept_length: MTP draft length (0: none) and the synthetic accept length.
        extras: time a prefill of 8192 tokens and 32 sequences at once instead of decoding one.
        repeats: timed repeats after one that is thrown away.
        tokens: length of a timed answer.
    """

    options: dict[str, Any] | None
    model: str = "flash"
    layers: int = 42
    contexts: tuple[int, ...] = (128,)
    draft_tokens: int = 0
    accept_length: float = 0.0
    extras: bool = False
    repeats: int = 3
    tokens: int = 272

    @property
    def workload(self) -> str:
        """The name in the result: plain, mtp3@2.68 or extras."""
        if self.extras:
            return "extras"
        return f"mtp{self.draft_tokens}@{self.accept_length:g}" if self.draft_tokens else "plain"

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step (with drafts a round) emits."""
        return self.accept_length if self.draft_tokens else 1.0


@dataclass(frozen=True)
class Decoded:
    """Milliseconds per emitted token after a prompt of `context` tokens: median, lowest, highest of the repeats.

    Attributes:
        graph_ms: GPU time of the model's CUDA graph, see `graphs.back_to_back`; None where nothing was replayed.
        accept_length: tokens over rounds of the timed repeats, prefill left out; None without drafts.
        host: what the CPU does in a step, in the engine's process; None where it, or the waiting, was not seen.
    """

    context: int
    ms: float
    low: float
    high: float
    graph_ms: float | None = None
    accept_length: float | None = None
    host: Host | None = None


@dataclass(frozen=True)
class Extra:
    """Another workload (`prefill8192`: ms of a prompt; `batch32`: ms of a step): median, lowest, highest."""

    workload: str
    ms: float
    low: float
    high: float


@dataclass
class Answer:
    """One engine's figures.

    Attributes:
        start_s: seconds from nothing to a ready engine, imports left out.
        choices: what the plugin chose and why.
        engine: where the engine ran: "own process" (vLLM's default) or "the bench's process".
        async_scheduling: whether vLLM scheduled a step ahead (its default was taken); None if unknown.
        weights_bytes: GPU memory that loading took, of the draft too, as vLLM measures it; None if it did not say.
        steps: the traced steps at the first context; None where no trace came.
        clocks: SM and memory clock, power, temperature right after the timed repeats, as nvidia-smi prints them.
        notes: parts that could not be measured, and why.
        failed: why the engine ended before its time; empty if it did not.
    """

    decoded: list[Decoded]
    start_s: float
    choices: dict[str, list[str]]
    engine: str = "unknown"
    async_scheduling: bool | None = None
    weights_bytes: int | None = None
    extras: list[Extra] = field(default_factory=list)
    steps: Steps | None = None
    clocks: str = ""
    notes: list[str] = field(default_factory=list)
    failed: str = ""


def read_answer(found: dict[str, Any]) -> Answer:
    """The answer from its JSON form."""
    steps = found["steps"]
    return Answer(
        **found
        | {
            "decoded": [
                Decoded(**row | {"host": None if row["host"] is None else Host(**row["host"])})
                for row in found["decoded"]
            ],
            "extras": [Extra(**row) for row in found["extras"]],
            "steps": None if steps is None else read_steps(steps),
        }
    )
