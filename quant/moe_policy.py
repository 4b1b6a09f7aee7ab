# SPDX-License-Identifier: Apache-2.0
"""Decides which backend runs the routed experts. Pure policy: no tensors, no kernels, no logging."""

from dataclasses import dataclass
from typing import Literal

from vllm_ling.errors import LingError

ExpertFormat = Literal["mxfp4", "fp8", "int4", "bf16"]
MoEChoice = Literal["torch", "reference", "stock", "humming", "marlin", "triton"]


@dataclass(frozen=True)
class MoEFacts:
    """What the decision rests on. `cli_backend` is vLLM's own `--moe-backend`."""

    fmt: ExpertFormat
    device: Literal["cpu", "cuda", "other"]
    clamped: bool
    cli_backend: str


def choose_moe(option: str, facts: MoEFacts) -> tuple[MoEChoice, str]:
    """Returns (choice, reason) for `ling.moe=option`.

    Raises:
        LingError: if an explicit option cannot be honoured on this device or for this format.
    """
    if option == "reference":
        return "reference", "ling.moe=reference: plain torch, experts dequantized at every call"
    if facts.device == "cpu":
        if option in ("humming", "marlin"):
            raise LingError(
                f"ling.moe={option}: {option} needs an NVIDIA GPU; on the CPU use ling, reference or auto"
            )
        return (
            "torch",
            f"ling.moe={option}: on the CPU experts are dequantized once and computed in plain torch",
        )
    if option in ("ling", "humming", "marlin"):
        if facts.fmt != "mxfp4":
            raise LingError(
                f"ling.moe={option} is for MXFP4 experts, but these experts are {facts.fmt}; use auto"
            )
        if facts.device != "cuda":
            raise LingError(f"ling.moe={option} needs an NVIDIA GPU; use auto")
        backend: MoEChoice = "marlin" if option == "marlin" else "humming"
        if facts.cli_backend not in ("auto", backend):
            raise LingError(
                f"ling.moe={option} contradicts --moe-backend {facts.cli_backend}; give one of them"
            )
        if option == "ling":
            return (
                backend,
                "ling.moe=ling: prefill and large batches; our kernel decodes from the same weights",
            )
        return backend, f"ling.moe={option}"
    if facts.clamped and facts.fmt in ("fp8", "bf16") and facts.cli_backend == "auto":
        # vLLM's first picks for these formats fuse the activation into the GEMM, out of the clamp's reach.
        return (
            "triton",
            f"{option}: clamped {facts.fmt} experts need a backend whose activation is a separate step",
        )
    return "stock", f"{option}: vLLM's own choice for {facts.fmt} experts (--moe-backend {facts.cli_backend})"


def measures(option: str, facts: MoEFacts) -> bool:
    """Whether `auto` times the backends here: only on a GPU, for MXFP4 experts, and where the user names none."""
    return (option, facts.fmt, facts.device, facts.cli_backend) == ("auto", "mxfp4", "cuda", "auto")
