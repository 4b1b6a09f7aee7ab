# SPDX-License-Identifier: Apache-2.0
"""The FP8 matrix product in the emulator against fp32 on the same bytes: RMS error at most 5e-3, as on a GPU."""

import pytest
import torch

from tests.emulator.common import CPU, gpu_with, normal, same_bits
from tests.emulator.emulator import Emulator
from tests.relative_error import rms
from vllm_ling.bench.layers import random_fp8
from vllm_ling.decode.reference import rms_norm
from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape, Prologue, plan

RMS = 5e-3


class Layer:
    """A projection of several parts with block scales, and inputs for every prologue."""

    def __init__(self, parts: tuple[int, ...], k: int, tokens: int, prologue: Prologue) -> None:
        made = [random_fp8(rows, k, CPU) for rows in parts]
        self.weights, self.scales = [w for w, _ in made], [s for _, s in made]
        self.dense = torch.cat([dequantize_block_fp8(w, s) for w, s in made])
        self.x = normal(tokens, {"swiglu": 2 * k, "joined": k // 2}.get(prologue, k), scale=3).bfloat16()
        self.second = normal(tokens, k // 2, scale=0.2).bfloat16()
        width = k // 2 if prologue == "joined" else k
        self.norms = [(1 + normal(width, scale=0.1)).bfloat16() for _ in range(2)]
        self.factors = torch.rand(tokens, k // 128, dtype=torch.float32)
        self.residual = normal(tokens, sum(parts), scale=2).bfloat16()
        self.normed = torch.full((tokens, k), torch.nan, dtype=torch.bfloat16)
        self.prologue, self.k = prologue, k

    def inputs(self, norms: list[torch.Tensor] | None = None) -> torch.Tensor:
        """What the weights are multiplied with."""
        left, right = norms or self.norms
        if self.prologue == "norm":
            return rms_norm(self.x, left, 1e-6)
        if self.prologue == "swiglu":
            gate, up = self.x.float().chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        if self.prologue == "gated":
            return self.x.float() * self.factors.repeat_interleave(128, -1)
        if self.prologue == "joined":
            return torch.cat([rms_norm(self.x, left, 1e-6), rms_norm(self.second, right, 1e-6)], -1)
        return self.x.float()

    def exact(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.dense.T + self.residual.float()

    def run(self, emulator: Emulator, kernel: Fp8Gemv, early: bool) -> torch.Tensor:
        out = self.residual.clone()
        with emulator.starts(early, self.x, self.second, self.factors, out):
            kernel(
                *(self.x, self.weights, self.scales, out),
                residual=out,
                norm=(self.norms[0], 1e-6),
                normed=self.normed if self.prologue == "norm" else None,
                factors=self.factors,
                second=(self.second, self.norms[1]),
            )
        return out


# rows of each part, k, SMs: warps share a tile two, eight and four at a time, or not at all
SIZES = {
    "three parts": ((256, 128, 144), 256, 6),
    "few rows": ((48,), 1024, 6),
    "many rows": ((384, 144), 256, 2),
    "uneven split": ((112,), 1280, 3),
}


@pytest.mark.parametrize(
    ("prologue", "size", "tokens"),
    [
        ("none", "three parts", 3),
        ("none", "few rows", 16),
        ("norm", "three parts", 8),
        ("norm", "many rows", 1),
        ("swiglu", "many rows", 4),
        ("swiglu", "uneven split", 1),
        ("gated", "uneven split", 7),
        ("gated", "three parts", 9),
        ("joined", "three parts", 1),
        ("joined", "many rows", 3),
        ("joined", "uneven split", 8),
    ],
)
def test_prologues(prologue: Prologue, size: str, tokens: int, emulator: Emulator) -> None:
    parts, k, sms = SIZES[size]
    layer = Layer(parts, k, tokens, prologue)
    kernel = Fp8Gemv(
        GemvShape(sum(parts), k, False, prologue=prologue, parts=parts), gpu_with(sms), CPU, None
    )
    out = same_bits(lambda early: layer.run(emulator, kernel, early))
    assert rms(out, layer.exact(layer.inputs())) < RMS
    if prologue == "norm":
        assert rms(layer.normed, layer.inputs()) < RMS
    if prologue in ("norm", "joined"):
        assert rms(out, layer.exact(layer.inputs([w.flip(0) for w in layer.norms]))) > RMS
    if prologue == "joined":
        assert rms(out, layer.exact(layer.inputs(layer.norms[::-1]))) > RMS
        assert rms(out, layer.exact(layer.inputs().roll(k // 2, -1))) > RMS
    if len(parts) > 1:
        layer.dense = torch.cat([layer.dense[parts[0] :], layer.dense[: parts[0]]])
        assert rms(out, layer.exact(layer.inputs())) > RMS


def test_splits_are_what_the_sizes_say() -> None:
    splits = {}
    for name, (parts, k, sms) in SIZES.items():
        found = plan(GemvShape(sum(parts), k, False, parts=parts), 4, gpu_with(sms))
        assert found is not None
        splits[name] = found.ksplit
    assert splits == {"three parts": 2, "few rows": 8, "many rows": 1, "uneven split": 4}


@pytest.mark.parametrize(("rows", "k", "sms"), [(1000, 256, 6), (40, 640, 3)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_row_scales_and_the_best_row(rows: int, k: int, sms: int, tokens: int, emulator: Emulator) -> None:
    weight = random_fp8(rows, k, CPU)[0]
    scales = torch.rand(rows, dtype=torch.float32) * 1e-3
    x = normal(tokens, k).bfloat16()
    # Two equal rows that are the best for token 0: the lower one wins.
    best = sorted(torch.randperm(rows)[:2].tolist())
    bytes_of = weight.view(torch.uint8)
    bytes_of[best[1]] = bytes_of[best[0]] = (x[0].float() * 60).to(torch.float8_e4m3fn).view(torch.uint8)
    scales[best] = 1e-2
    kernel = Fp8Gemv(GemvShape(rows, k, True), gpu_with(sms), CPU, None)

    def product(early: bool) -> torch.Tensor:
        out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
        with emulator.starts(early, x):
            kernel(x, weight, scales, out)
        return out

    out, exact = same_bits(product), (x.float() @ weight.float().T) * scales
    assert rms(out, exact) < RMS < rms(out, exact.roll(1, 1))
    argmax = Fp8Gemv(GemvShape(rows, k, True, argmax=True), gpu_with(sms), CPU, None)
    for early in (True, False, True):
        ids = torch.full((tokens,), -1, dtype=torch.int64)
        with emulator.starts(early, x):
            argmax(x, weight, scales, ids)
        assert ids.tolist() == out.float().argmax(-1).tolist() and ids[0] == best[0]


def test_every_code(emulator: Emulator) -> None:
    """All 256 E4M3 bytes, NaN aside, at each of four neighbouring places."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0
    weight = codes.repeat(128, 1).T.contiguous().view(torch.float8_e4m3fn)
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    for token in range(4):
        x[token, 76 + token] = 1
    out = torch.empty(4, 256, dtype=torch.bfloat16)
    kernel = Fp8Gemv(GemvShape(256, 128, True), gpu_with(2), CPU, None)
    kernel(x, weight, torch.ones(256, dtype=torch.float32), out)
    assert torch.equal(out.float(), weight[:, :1].float().T.expand(4, -1))


FAULTS = {
    "a block is used before it is there": ("wait_copies<STAGES - 1>();", "wait_copies<STAGES>();"),
    "x is staged before it is there": (
        "  wait_for_x();\n  row.load(x, tokens);",
        "  row.load(x, tokens);",
    ),
    "sums are added before all are there": ("    __syncthreads();\n    if (part == 0)", "    if (part == 0)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, emulator: Emulator) -> None:
    parts, k, sms = SIZES["three parts"]
    layer = Layer(parts, k, 4, "norm")
    shape = GemvShape(sum(parts), k, False, prologue="norm", parts=parts)
    with emulator.fault(*FAULTS[name]), pytest.raises(AssertionError):
        for attempt in range(8):
            kernel = Fp8Gemv(shape, gpu_with(sms), CPU, None)
            assert rms(layer.run(emulator, kernel, attempt % 2 == 0), layer.exact(layer.inputs())) < RMS
