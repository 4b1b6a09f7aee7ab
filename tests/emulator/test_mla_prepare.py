# SPDX-License-Identifier: Apache-2.0
"""The kernel before vLLM's own MLA attention in the emulator against fp32: RMS error at most 5e-3, as on a GPU."""

import pytest
import torch

from tests.emulator.common import gpu_with, normal
from tests.emulator.emulator import Emulator
from tests.relative_error import rms
from vllm_ling.decode.mla_prepare import MlaInputs, MlaPrepare, MlaShape, MlaWeights
from vllm_ling.decode.reference import mla_prepare_reference

RMS = 5e-3
SHAPES = {
    "small": MlaShape(heads=4, hidden=256, nope=64, latent=128),
    "wider": MlaShape(heads=8, hidden=512),
}


def check(emulator: Emulator, shape: MlaShape, tokens: int) -> None:
    """A launch against the reference, and controls that must fail."""
    w = MlaWeights(
        latent_norm=(1 + normal(shape.latent, scale=0.1)).bfloat16(),
        gate=normal(shape.heads, shape.hidden, scale=0.05).bfloat16(),
        cos_sin=normal(100, 64).clamp(-1, 1).bfloat16(),
        eps=1e-6,
    )
    projected, normed = (
        normal(tokens, sum(shape.projected)).bfloat16(),
        normal(tokens, shape.hidden).bfloat16(),
    )
    positions = torch.randint(0, 100, (tokens,))
    exact = mla_prepare_reference(shape, projected, normed, positions, w)
    ours = MlaInputs(
        *(
            torch.full(t.shape, torch.nan, dtype=torch.bfloat16)
            for t in (exact.query, exact.latent, exact.key)
        ),
        torch.full(exact.gate.shape, torch.nan, dtype=torch.float32),
    )
    with emulator.starts(True, projected, normed):
        MlaPrepare(shape, gpu_with(4), None)(projected, normed, positions, w, ours)
    moved = mla_prepare_reference(shape, projected, normed.roll(1, -1), (positions + 1) % 100, w)
    for name in ("query", "latent", "key", "gate"):
        assert rms(getattr(ours, name), getattr(exact, name)) < RMS, name
        assert name == "latent" or rms(getattr(ours, name), getattr(moved, name)) > RMS, name


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_prepare(name: str, tokens: int, emulator: Emulator) -> None:
    check(emulator, SHAPES[name], tokens)


FAULTS = {
    "queries are read before they are there": (
        "wait_for_producer();\n  const uint32_t *in = ",
        "const uint32_t *in = ",
    ),
    "pairs turn the wrong way": ("a * cosine - b * sine", "a * cosine + b * sine"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, emulator: Emulator) -> None:
    with emulator.fault(*FAULTS[name]), pytest.raises(AssertionError):
        check(emulator, SHAPES["small"], 2)
