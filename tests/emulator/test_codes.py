# SPDX-License-Identifier: Apache-2.0
"""Every code of every number format, at every place of a word, as the kernels unpack it, against the codecs."""

import ctypes
from pathlib import Path

import pytest
import torch

from tests.emulator.emulator import EmulatedKernel, Emulator
from vllm_ling.quant.mxfp4 import dequantize_mxfp4


@pytest.fixture
def unpacked(emulator: Emulator) -> dict[str, torch.Tensor]:
    made = {
        "e4m3": torch.empty(256, 4, dtype=torch.float32),
        "e2m1": torch.empty(16, 8, dtype=torch.float16),
        "scale": torch.empty(256, 4, dtype=torch.float32),
        "range": torch.empty(256, dtype=torch.float32),
    }
    kernel = EmulatedKernel(emulator, str(Path(__file__).parent / "codes.cu"), {"USE_PDL": 0}, 0)
    pointers = tuple(tensor.data_ptr() for tensor in made.values())
    kernel.launch((1, 1), 256, pointers, (ctypes.c_void_p,) * 4, 0, False)
    return made


def test_e4m3(unpacked: dict[str, torch.Tensor]) -> None:
    """The two NaN codes become 480, the number that their bits would be."""
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    expected[127], expected[255] = 480, -480
    assert torch.equal(unpacked["e4m3"], expected[:, None].expand(-1, 4))


def test_e2m1(unpacked: dict[str, torch.Tensor]) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes << 4)[:, None].repeat(1, 16)
    expected = dequantize_mxfp4(packed, torch.full((16, 1), 127, dtype=torch.uint8))[:, :8]
    assert torch.equal(unpacked["e2m1"].float() * 2**14, expected.float())


def test_e8m0(unpacked: dict[str, torch.Tensor]) -> None:
    expected = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).float()
    expected[0], expected[255] = 0, torch.inf
    assert torch.equal(unpacked["scale"], expected[:, None].expand(-1, 4))


def test_half_range(unpacked: dict[str, torch.Tensor]) -> None:
    """Both factors undo each other and E2M1's 2^-14, where values are not too small to matter."""
    assert torch.equal(unpacked["range"][15:255], torch.full((240,), 2.0**14))
    assert not unpacked["range"][:15].any()
