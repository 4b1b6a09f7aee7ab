# SPDX-License-Identifier: Apache-2.0
"""A family of kernels picks the smallest that takes the tokens at hand; binaries are built, but not loaded, here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_ling.quant import fp8_gemv, kernel_family
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape
from vllm_ling.quant.kernel_family import KernelFamily
from vllm_ling.quant.tune import GPUS


@dataclass(frozen=True)
class Loaded:
    """Stands in for a kernel on a GPU."""

    cubin: bytes
    name: str
    shared_bytes: int


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelFamily[Any]:
    monkeypatch.setattr(kernel_family, "Kernel", Loaded)
    shape, gpu = GemvShape(256, 256, row_scales=True), GPUS["gb10"]
    plans = [None, *(fp8_gemv.plan(shape, tokens, gpu) for tokens in (1, 4))]
    return KernelFamily(
        "fp8_gemv.cu", shape, plans, lambda p: fp8_gemv.defines(shape, p, True), gpu, tmp_path
    )


def test_the_smallest_kernel_that_fits_is_picked(family: KernelFamily[Any]) -> None:
    assert family.max_tokens == 4 and family.origins == {1: "compiled", 4: "compiled"}
    for tokens, expected in ((1, 1), (2, 4), (4, 4)):
        plan, kernel = family.pick(tokens)
        assert plan.tokens == expected
        assert kernel.name == "fp8_gemv" and kernel.shared_bytes == plan.shared_bytes
    with pytest.raises(StopIteration):
        family.pick(5)


def test_no_plan_at_all_is_refused_by_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="101376 bytes of shared memory are too few for a shape"):
        KernelFamily("fp8_gemv.cu", "a shape", [None, None], lambda p: {}, GPUS["gb10"], tmp_path)


def test_an_unsupported_shape_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    shape = GemvShape(256, 250, row_scales=True)
    reason = fp8_gemv.unsupported(shape)
    assert reason
    import torch

    with pytest.raises(ValueError) as caught:
        Fp8Gemv(shape, GPUS["gb10"], torch.device("cpu"), tmp_path)
    assert str(caught.value) == reason and not list(tmp_path.iterdir())
