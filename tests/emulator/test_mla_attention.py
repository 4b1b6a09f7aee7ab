# SPDX-License-Identifier: Apache-2.0
"""MLA's three kernels in the emulator against fp32, as the GPU test of the same name: RMS error at most 1e-2."""

import dataclasses

import pytest
import torch

from tests.emulator.common import CPU, gpu_with, same_bits
from tests.emulator.emulator import Emulator
from tests.gpu.mla_case import Case
from tests.relative_error import rms
from vllm_ling.decode.mla_attention import MlaAttention
from vllm_ling.decode.mla_prepare import MlaShape
from vllm_ling.decode.reference import latent_query_reference, mla_prepare_reference
from vllm_ling.quant.jit import Gpu

RMS = 1e-2
SMALL = MlaShape(heads=4, hidden=256, nope=64, latent=128)
WIDE = MlaShape(heads=20, hidden=512, nope=128, latent=256)  # two tiles of heads, one of them not full
KERNELS: dict[tuple[MlaShape, bool, int, int], MlaAttention] = {}


def kernel_of(shape: MlaShape, contiguous: bool, gpu: Gpu) -> MlaAttention:
    key = shape, contiguous, gpu.sms, gpu.shared_bytes
    if key not in KERNELS:
        KERNELS[key] = MlaAttention(shape, contiguous, gpu, CPU, None)
    return KERNELS[key]


def check(emulator: Emulator, kernel: MlaAttention, case: Case, early: bool = True) -> torch.Tensor:
    """One step against the reference; its output."""
    for scratch in (kernel._query, kernel._sums, kernel._peaks):
        scratch.fill_(torch.nan)
    right, ours = case.copy(), case.copy()
    exact = case.exact(right)
    gate, out = case.outputs()
    with emulator.starts(early, case.projected, case.normed):
        case.run(kernel, ours, gate, out)
    made = mla_prepare_reference(case.shape, case.projected, case.normed, case.positions, case.weights)
    assert rms(kernel.query[: case.tokens], latent_query_reference(made, case.latent)) < RMS
    assert kernel.query[case.tokens :].isnan().all(), "of no token"
    real = case.tokens - case.padding
    assert rms(out[:real], exact[:real]) < RMS
    assert not out[real:].any(), "tokens of no sequence give zeros"
    assert rms(gate, (case.normed.float() @ case.weights.gate.float().T).sigmoid()) < 1e-5
    for slot in case.batch.slots.tolist():
        if slot >= 0:
            block, row = divmod(slot, case.block_size)
            assert rms(ours.cache[block, row], right.cache[block, row]) < RMS
            ours.cache[block, row] = case.batch.cache[block, row]
    assert torch.equal(ours.cache.view(torch.int16), case.batch.cache.view(torch.int16)), "other rows"
    return out


BATCHES = {
    "one key": ([(1, 1)], 0, 16),
    "31 keys": ([(31, 1)], 0, 48),
    "32 keys": ([(32, 2)], 0, 16),
    "33 keys": ([(33, 1)], 0, 48),
    "a split each": ([(190, 1)], 0, 16),
    "verify 4 of 4": ([(4, 4)], 0, 48),
    "verify 4 across a tile": ([(34, 4)], 0, 16),
    "verify 8": ([(100, 8)], 0, 48),
    "three sequences and padding": ([(5, 1), (100, 1), (64, 1)], 1, 48),
    "verify 2 and 3 and padding": ([(130, 2), (41, 3)], 3, 16),
}


@pytest.mark.parametrize("contiguous", [False, True], ids=["latent columns", "latent rows"])
@pytest.mark.parametrize("name", BATCHES)
def test_attention(name: str, contiguous: bool, emulator: Emulator) -> None:
    sequences, padding, block_size = BATCHES[name]
    case = Case(SMALL, contiguous, sequences, padding, block_size, device="cpu")
    kernel = kernel_of(SMALL, contiguous, gpu_with(6))
    out = same_bits(lambda early: check(emulator, kernel, case, early))
    real, lengths = case.tokens - padding, case.batch.lengths
    if int(lengths.max()) > 1:  # one key has all the weight, whatever the query
        turned = case.exact(case.copy(), positions=(case.positions + 1) % 4096)
        assert rms(out[:real], turned[:real]) > RMS, "rotary embedding"
        fewer = dataclasses.replace(case.copy(), lengths=(lengths - 1).clamp(min=1))
        assert rms(out[:real], case.exact(fewer)[:real]) > RMS, "a key less"
        for change in ("key", "value"):
            flipped = dataclasses.replace(case.latent, **{change: getattr(case.latent, change).flip(0)})
            assert rms(out[:real], case.exact(case.copy(), flipped)[:real]) > RMS, change


@pytest.mark.parametrize(
    ("sms", "shared"),
    [(1, 227), (40, 227), (6, 99)],
    ids=["one split", "more splits than tiles", "two stages"],
)
def test_other_gpus(sms: int, shared: int, emulator: Emulator) -> None:
    case = Case(WIDE, sms > 1, [(130, 1), (40, 1)], 0, 16, device="cpu")
    check(emulator, kernel_of(WIDE, sms > 1, gpu_with(sms, shared)), case)


FAULTS = {
    "a tile is read before all have copied it": (
        "__syncthreads();  // the tile is there",
        "__syncwarp();  //",
    ),
    "the last keys are read before they are written": (
        "begin + (tile + 1) * TILE > keys.written",
        "tile < 0",
    ),
    "keys after the last one count": ("first + i < end ? x[i] * scale", "true ? x[i] * scale"),
    "a CTA is told before it listens": ("  cluster_wait();\n", "  cluster_wait;\n"),
    "weights are used before they are there": ("  wait_copies<0>();\n", "\n"),
    "the output is written early": ("  s.product.multiply();\n  __syncthreads();", "  s.product.multiply();"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, emulator: Emulator) -> None:
    case = Case(SMALL, True, [(70, 2)], device="cpu")
    with emulator.fault(*FAULTS[name]), pytest.raises(AssertionError):
        kernel = MlaAttention(SMALL, True, gpu_with(6), CPU, None)
        for attempt in range(8):
            check(emulator, kernel, case, attempt % 2 == 0)
