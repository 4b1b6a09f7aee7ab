# SPDX-License-Identifier: Apache-2.0
"""Kernels on the CPU, in the place of `quant.jit.build` and `quant.jit.Kernel`: the host side stays as it is.

The source of a kernel is compiled with g++, a fiber for each of its threads. A seeded scheduler interleaves warps, and
what a GPU may do late (asynchronous copies, stores that others poll for, pushes into other CTAs) happens at random
times. Not emulated: time, the order of plain loads and stores (each is seen at once), the rounding of fast math and of
sums inside a tensor core.
"""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulator.build import Builder, Defines
from tests.emulator.launches import END, EarlyStarts, EmulationError, Running
from vllm_ling.quant.jit import Built


class Emulator(Builder):
    """Builds and launches kernels.

    Attributes:
        seed: of the last launch; every launch takes the next one.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seed = 0
        self._early: EarlyStarts | None = None

    def build(self, source: str, defines: Defines, arch: str, cache: Path | None) -> Built:
        """In the place of `jit.build`; what it returns is compiled when it is first launched."""
        return Built(json.dumps([source, dict(defines)]).encode(), "emulated")

    def kernel(self, cubin: bytes, name: str, shared_bytes: int = 0) -> "EmulatedKernel":
        """In the place of `jit.Kernel`."""
        source, defines = json.loads(cubin)
        return EmulatedKernel(self, source, defines, shared_bytes)

    @contextmanager
    def starts(self, early: bool, *late: torch.Tensor) -> Iterator[None]:
        """Within, if `early`, a launch begins before the one before it has written anything, as far as both allow.

        `late` are what the launch before the first one writes: NaN until the first one waits for it. Outputs are
        there at the end of the context. If not `early`, nothing has to be waited for, as when all before is long over.
        """
        if not early:
            yield
            return
        self._early = EarlyStarts(late)
        try:
            yield
            self._early.finish()
        finally:
            self._early.free()
            self._early = None

    def launch(self, launch: Running, pdl: bool) -> None:
        """Runs to the end, or as far as `starts` says."""
        if self._early is not None:
            self._early.follow(launch, pdl)
            return
        try:
            launch.run(END)
        finally:
            launch.free()


class EmulatedKernel:
    """One entry point, as `jit.Kernel`."""

    def __init__(self, emulator: Emulator, source: str, defines: Defines, shared_bytes: int) -> None:
        self._emulator, self._source, self._defines = emulator, source, defines
        self._shared_bytes = shared_bytes

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        values: tuple[Any, ...],
        types: tuple[Any, ...],
        stream: int,
        pdl: bool,
        cluster: int = 1,
    ) -> None:
        """As `Kernel.launch`.

        Raises:
            CompileError: with the messages of g++.
            EmulationError: the arguments do not fit, a thread did what it must not do, or nothing gets done any more.
        """
        emulator = self._emulator
        library = emulator.library(self._source, self._defines)
        sizes = [size for size in (ctypes.c_int * 64).in_dll(library, "emulator_sizes") if size]
        given = [ctypes.sizeof(kind) for kind in types]
        if sizes != given:
            raise EmulationError(f"{self._source} takes arguments of {sizes} bytes, not {given}")
        emulator.seed += 1
        running = Running(
            *(emulator.runtime, f"{self._source}, seed {emulator.seed}", library.emulator_call),
            [kind(value) for kind, value in zip(types, values, strict=True)],
            grid_x=grid[0],
            grid_y=grid[1],
            threads=threads,
            cluster=cluster,
            shared_bytes=self._shared_bytes,
            pdl=int(pdl),
            seed=emulator.seed,
        )
        emulator.launch(running, pdl)


@contextmanager
def emulated(emulator: Emulator, *modules: Any) -> Iterator[None]:
    """Within, `modules` build and launch kernels with `emulator`, on a stream that needs no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "build", emulator.build)
            patch.setattr(module, "Kernel", emulator.kernel)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
        yield


class _Stream:
    cuda_stream = 0
