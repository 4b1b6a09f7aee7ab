# SPDX-License-Identifier: Apache-2.0
"""One emulator for all tests; a kernel variant is compiled once."""

from collections.abc import Iterator

import pytest
import torch

from tests.emulator.build import COMPILER
from tests.emulator.emulator import Emulator, emulated
from vllm_ling.decode import mla_attention, mla_prepare
from vllm_ling.quant import kernel_family


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Skips where nothing can be compiled."""
    if COMPILER is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    return Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(autouse=True)
def in_place_of_a_gpu(emulator: Emulator) -> Iterator[None]:
    """A test sees the same numbers and schedules whether it runs alone or not."""
    torch.manual_seed(0)
    emulator.seed = 0
    with emulated(emulator, kernel_family, mla_attention, mla_prepare):
        yield
