# SPDX-License-Identifier: Apache-2.0
"""The head probe equals a direct computation, passes a sound FP8 head and fails every broken one."""

import pytest
import torch

from vllm_ling.quant.head_probe import HeadProbe, ProbeResult
from vllm_ling.quant.row_fp8 import quantize_row_fp8

ROWS, HIDDEN = 1000, 256


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, HIDDEN, generator=generator) * 0.1
    # Rows of different size: a forgotten row scale must show.
    return rows * torch.rand(ROWS, 1, generator=generator).add(0.2)


def run(reference: torch.Tensor, candidate: torch.Tensor, chunk: int) -> ProbeResult:
    probe = HeadProbe(HIDDEN, torch.device("cpu"))
    for begin in range(0, ROWS, chunk):
        probe.update(reference[begin : begin + chunk], candidate[begin : begin + chunk])
    return probe.result()


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    quantized, scale = quantize_row_fp8(weight)
    return quantized.float() * scale[:, None]


@pytest.mark.parametrize("chunk", [7, 256, ROWS])
def test_streaming_equals_direct(weight: torch.Tensor, chunk: int) -> None:
    candidate = dequantized(weight)
    result = run(weight, candidate, chunk)
    probe = HeadProbe(HIDDEN, torch.device("cpu"))
    exact, approximate = probe._hidden @ weight.T, probe._hidden @ candidate.T
    kl = torch.nn.functional.kl_div(
        approximate.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert result.mean_kl == pytest.approx(float(kl.mean()), rel=1e-2)
    assert result.top1 == pytest.approx(float((exact.argmax(-1) == approximate.argmax(-1)).float().mean()))
    assert result.rms == pytest.approx(float((exact - approximate).norm() / exact.norm()), rel=1e-4)


def test_sound_head_passes(weight: torch.Tensor) -> None:
    result = run(weight, dequantized(weight), 256)
    assert result.ok, result
    assert 0.015 < result.rms < 0.035  # the derivation says 2.4%


@pytest.mark.parametrize("broken", ["no scale", "shifted scale", "half scale", "one nan", "transposed bytes"])
def test_broken_head_fails(weight: torch.Tensor, broken: str) -> None:
    quantized, scale = quantize_row_fp8(weight)
    values = quantized.float()
    candidate = {
        "no scale": values,
        "shifted scale": values * scale.roll(1)[:, None],
        "half scale": values * scale[:, None] * 0.5,
        "one nan": (values * scale[:, None]).index_fill(0, torch.tensor([3]), torch.nan),
        "transposed bytes": (values * scale[:, None]).flatten().view(HIDDEN, ROWS).T,
    }[broken]
    assert not run(weight, candidate, 256).ok
