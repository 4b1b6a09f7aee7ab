# SPDX-License-Identifier: Apache-2.0
"""KDA between its projections in the emulator against fp32: RMS error at most 5e-3, as on a GPU."""

import copy
import dataclasses

import pytest
import torch
from torch.nn.functional import softplus

from tests.emulator.common import CPU, gpu_with, normal
from tests.emulator.emulator import Emulator
from tests.relative_error import rms
from vllm_ling.bench.chain import random_kda
from vllm_ling.decode import reference
from vllm_ling.decode.kda_step import KdaBatch, KdaShape, KdaStates, KdaStep, KdaWeights
from vllm_ling.decode.reference import kda_step_reference

RMS = 5e-3
SHAPE = KdaShape(heads=2, hidden=640)
KERNELS: dict[bool, KdaStep] = {}


def kernel_of(safe_gate: bool = True) -> KdaStep:
    if safe_gate not in KERNELS:
        KERNELS[safe_gate] = KdaStep(dataclasses.replace(SHAPE, safe_gate=safe_gate), gpu_with(8), None)
    return KERNELS[safe_gate]


def states(dim_first: bool) -> KdaStates:
    wide = 3 * SHAPE.heads * 128
    conv = normal(12, wide, 10).bfloat16() if dim_first else normal(12, 10, wide).bfloat16().mT
    return KdaStates(conv, normal(12, SHAPE.heads, 128, 128, scale=0.3))


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# batch and its tokens
BATCHES = {
    "one": (KdaBatch(integers(3)), 1),
    "three and a padded one": (KdaBatch(integers(5, 2, 0, 7)), 4),
    "verify 2 after 1": (KdaBatch(integers(2, 3)[None], integers(0, 2), integers(1), 2), 2),
    "verify 4 after 3": (KdaBatch(integers(2, 3, 4, 5)[None], integers(0, 4), integers(3), 4), 4),
    "two verifications of 2 and 4 and a padded one": (
        KdaBatch(
            torch.stack([integers(1, 2, 3, 4), integers(8, 7, 6, 5), integers(0, 0, 0, 0)]),
            integers(0, 2, 6, 6),
            integers(2, 4, 1),
            4,
        ),
        6,
    ),
    "verify 8 after 8": (
        KdaBatch(integers(1, 2, 3, 4, 5, 6, 7, 8)[None], integers(0, 8), integers(8), 8),
        8,
    ),
}


def check(
    emulator: Emulator, kernel: KdaStep, w: KdaWeights, pool: KdaStates, batch: KdaBatch, tokens: int
) -> None:
    """A step under two schedules against the reference, and controls that must fail."""
    projected, normed = (
        normal(tokens, 5 * SHAPE.heads * 128).bfloat16(),
        normal(tokens, SHAPE.hidden).bfloat16(),
    )
    outs, pools = [], []
    for early in (True, False):
        out = torch.full((tokens, SHAPE.heads * 128), torch.nan, dtype=torch.bfloat16)
        mine = copy.deepcopy(pool)
        with emulator.starts(early, projected, normed):
            kernel(projected, normed, w, mine, batch, out)
        outs.append(out)
        pools.append(mine)
    assert torch.equal(outs[0], outs[1]) and torch.equal(pools[0].recurrent, pools[1].recurrent)

    def exact(weights: KdaWeights, states: KdaStates) -> torch.Tensor:
        return kda_step_reference(kernel.shape, projected, normed, weights, states, batch)

    exact_pool = copy.deepcopy(pool)
    assert rms(outs[0], exact(w, exact_pool)) < RMS
    for ours in pools:
        assert torch.equal(ours.conv, exact_pool.conv)
        assert rms(ours.recurrent, exact_pool.recurrent) < 1e-5, "float32 states, another order of sums"
        untouched = [slot for slot in range(12) if slot == 0 or slot not in batch.slots.flatten().tolist()]
        assert torch.equal(ours.recurrent[untouched], pool.recurrent[untouched])
    for change in ({"q_conv": w.k_conv}, {"b": -w.b}, {"a_log": w.a_log + 1}, {"o_norm": w.o_norm.flip(0)}):
        other = copy.deepcopy(pool)
        wrong = exact(dataclasses.replace(w, **change), other)
        assert rms(outs[0], wrong) > RMS or rms(pools[0].recurrent, other.recurrent) > 1e-3, change


@pytest.mark.parametrize("dim_first", [False, True], ids=["token rows", "channel rows"])
@pytest.mark.parametrize("name", BATCHES)
def test_step(name: str, dim_first: bool, emulator: Emulator) -> None:
    check(emulator, kernel_of(), random_kda(SHAPE, CPU), states(dim_first), *BATCHES[name])


def test_unbounded_decay(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_decay(f: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, _: float) -> torch.Tensor:
        return -a_log.exp().view(-1, 1) * softplus((f.float() + dt_bias).view(len(f), len(a_log), -1))

    monkeypatch.setattr(reference, "log_decay", log_decay)
    check(emulator, kernel_of(False), random_kda(SHAPE, CPU), states(True), *BATCHES["verify 4 after 3"])


def test_padded_tokens_are_zero_and_their_slots_untouched(emulator: Emulator) -> None:
    pool = states(False)
    before, out = copy.deepcopy(pool), torch.full((2, SHAPE.heads * 128), torch.nan, dtype=torch.bfloat16)
    projected, normed = normal(2, 5 * SHAPE.heads * 128).bfloat16(), normal(2, SHAPE.hidden).bfloat16()
    kernel_of()(projected, normed, random_kda(SHAPE, CPU), pool, KdaBatch(integers(0, -1)), out)
    assert (
        not out.any()
        and torch.equal(pool.conv, before.conv)
        and torch.equal(pool.recurrent, before.recurrent)
    )


FAULTS = {
    "a CTA is told before it listens": ("  cluster_wait();\n  if (n < count", "  if (n < count"),
    "a CTA does not wait for the others": ("  wait_pushed(&s.norms_in);\n", ""),
    "too few bytes are expected": ("SPLIT * count * (int)sizeof(float)", "count * (int)sizeof(float)"),
    "the recurrence begins before all is there": ("  __syncthreads();\n  state.run(", "  state.run("),
    "the history changes while others read it": (
        "  write_normed(",
        "  if (part == 0) qk.save(conv, xs, count);\n  write_normed(",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, emulator: Emulator) -> None:
    with emulator.fault(*FAULTS[name]), pytest.raises(AssertionError):
        for _ in range(8):
            check(
                *(emulator, KdaStep(SHAPE, gpu_with(8), None), random_kda(SHAPE, CPU), states(False)),
                *BATCHES["verify 4 after 3"],
            )
