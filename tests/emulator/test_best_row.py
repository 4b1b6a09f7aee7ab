# SPDX-License-Identifier: Apache-2.0
"""The FP8 product that gives the row of the largest logit: exact, whatever earlier launches left in its exchange."""

import pytest
import torch

from tests.emulator.common import CPU, gpu_with, normal
from tests.emulator.emulator import Emulator
from vllm_ling.bench.layers import random_fp8
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape, plan


class Head:
    """A weight with a scale per row; `logits` are those that the kernel without argmax writes."""

    def __init__(self, rows: int, k: int, sms: int) -> None:
        self.weight, self.scales = random_fp8(rows, k, CPU)[0], torch.rand(rows, dtype=torch.float32)
        self.k, self._gpu = k, gpu_with(sms)
        self._product = Fp8Gemv(GemvShape(rows, k, True), self._gpu, CPU, None)

    def kernel(self) -> Fp8Gemv:
        rows, k = self.weight.shape
        return Fp8Gemv(GemvShape(rows, k, True, argmax=True), self._gpu, CPU, None)

    def tokens(self, count: int) -> torch.Tensor:
        return normal(count, self.k).bfloat16()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.full((x.shape[0], len(self.weight)), torch.nan, dtype=torch.bfloat16)
        return self._product(x, self.weight, self.scales, out).float()

    def best(self, kernel: Fp8Gemv, x: torch.Tensor) -> torch.Tensor:
        return kernel(x, self.weight, self.scales, torch.full((x.shape[0],), -1, dtype=torch.int64))


# rows, k, SMs: several warps with rows in each CTA, CTAs without any, warps that share tiles, more CTAs than a warp has
# lanes, one CTA
SIZES = {
    "many rows": (700, 128, 3),
    "few rows": (40, 128, 5),
    "split": (40, 640, 3),
    "many CTAs": (1300, 128, 75),
    "one CTA": (100, 128, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_launches_of_all_token_counts_in_turn(name: str, emulator: Emulator) -> None:
    """They share an exchange; each starts while the one before it runs, or when that is long over."""
    head = Head(*SIZES[name])
    kernel = head.kernel()
    for early in (True, False, True):
        given = [head.tokens(count) for count in (16, 1, 1, 3, 9, 2, 16)]
        right = [head.logits(x).argmax(-1) for x in given]
        with emulator.starts(early, given[0]):
            found = [head.best(kernel, x) for x in given]
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in right]


def test_sizes_are_what_their_names_say() -> None:
    plans = {name: plan(GemvShape(rows, k, True), 1, gpu_with(sms)) for name, (rows, k, sms) in SIZES.items()}
    assert {name: found.ksplit for name, found in plans.items() if found and found.ksplit > 1} == {"split": 8}


def test_two_kernels_take_turns(emulator: Emulator) -> None:
    """Each has an exchange of its own, and counts its own launches."""
    head = Head(*SIZES["few rows"])
    first, second = head.kernel(), head.kernel()
    for kernel in (first, first, second, first, second):
        x = head.tokens(2)
        assert head.best(kernel, x).tolist() == head.logits(x).argmax(-1).tolist()
    assert [int(kernel._exchange.view(torch.int32)[0]) for kernel in (first, second)] == [3, 2]


def test_tags_wrap(emulator: Emulator) -> None:
    """The launch's number goes past 2^32 - 1 to 1, as 0 means never written."""
    head = Head(*SIZES["few rows"])
    kernel = head.kernel()
    epoch = kernel._exchange.view(torch.int32)
    epoch[0] = -3
    for tag in (-2, -1, 1, 2):
        x = head.tokens(3)
        with emulator.starts(tag % 2 == 0, x):
            ids = head.best(kernel, x)
        assert ids.tolist() == head.logits(x).argmax(-1).tolist() and int(epoch[0]) == tag


def ties() -> None:
    """Negative logits, the largest several times, and a token of zeros, those in front negative ones."""
    head = Head(*SIZES["many CTAs"])
    kernel, x = head.kernel(), torch.ones(2, 128, dtype=torch.bfloat16)
    x[1] = 0
    for best in ((1299, 17, 700), (16, 24), (0, 1299), (5, 2, 9)):
        values = torch.full((1300,), -2.0, dtype=torch.float32)
        values[list(best)] = -1
        head.scales = torch.where(torch.arange(1300) < best[1], -1.0, 1.0)
        head.weight = (values * head.scales)[:, None].repeat(1, 128).to(torch.float8_e4m3fn)
        assert torch.equal(head.logits(x)[0], 128 * values)
        assert head.best(kernel, x).tolist() == [min(best), 0]


def test_of_equal_logits_the_lowest_row_wins(emulator: Emulator) -> None:
    ties()
    for fault in (("other_row < row", "other_row > row"), ("logit == 0.f ? 0x80000000u : ", "")):
        with emulator.fault(*fault), pytest.raises(AssertionError):
            ties()


def test_nan_never_wins(emulator: Emulator) -> None:
    """Rows that give NaN, and a token that is NaN, between others; it gets a row that there is."""
    head = Head(*SIZES["few rows"])
    kernel, x = head.kernel(), head.tokens(3)
    right = head.logits(x)
    bad = [3, 17, *right[0].argsort()[-3:].tolist()]
    head.scales[bad] = torch.nan
    right[:, bad] = -torch.inf
    x[1, 5] = torch.nan
    for early in (True, False):
        with emulator.starts(early, x):
            ids = head.best(kernel, x)
        assert ids[[0, 2]].tolist() == right[[0, 2]].argmax(-1).tolist()
        assert int(ids[1]) == 0


FAULTS = {
    "the reader does not look at the tag": ("return tag() ^ want;", "return 0;"),
    "the tag is always the same": ("return epoch + 1 ? epoch + 1 : 1;", "return 1;"),
    "the launch's number is not kept": ("if (token == 0) store_epoch(&exchange->epoch, tag);", ""),
    "the number is read too early": ("wait_for_producer();\n    if (ARGMAX", "if (ARGMAX"),
    "a CTA's best comes without a tag": ("best.row, tag);", "best.row, 0);"),
    "a CTA's best is that of one warp": ("at(min(i * 4 + lane / 8, WARPS - 1))", "at(0)"),
    "a CTA's best is taken before its warps are there": (
        "  __syncthreads();\n#pragma unroll 1\n  for (int token",
        "  for (int token",
    ),
    "the last CTA looks at itself only": (
        "word[i].start(i * 32 + lane < GRID, tag)",
        "word[i].start(false, tag)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, emulator: Emulator) -> None:
    head = Head(*SIZES["many rows"])
    with emulator.fault(*FAULTS[name]), pytest.raises(AssertionError):
        kernel = head.kernel()
        for launch in range(12):
            given = [head.tokens(3), head.tokens(1)]
            right = [head.logits(x).argmax(-1).tolist() for x in given]
            with emulator.starts(launch % 2 == 0, given[0]):
                found = [head.best(kernel, x) for x in given]
            assert [ids.tolist() for ids in found] == right
