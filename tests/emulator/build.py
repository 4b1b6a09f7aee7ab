# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for the CPU with g++ and runs them, in the place of `quant.jit.build` and `quant.jit.Kernel`."""

import ctypes
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulator.translate import translate
from vllm_ling.quant import jit

COMPILER = shutil.which("g++")
_RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-w",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-ffp-contract=off",
)
# What hardware would not do, or not notice: a trap, which the runtime reports with the thread that met it.
_CHECKS = (
    "-fsanitize=alignment,integer-divide-by-zero,shift",
    "-fsanitize-undefined-trap-on-error",
)
_PRODUCER_NEEDED, _CONSUMER_MAY_START, _END = range(3)
Defines = Mapping[str, int | str]


class EmulationError(AssertionError):
    """A kernel did what it must not do; the message says which thread did what."""


class _Launch(ctypes.Structure):
    """struct Launch of runtime/grid.h."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        *(
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "threads", "cluster", "shared_bytes", "pdl")
        ),
        ("seed", ctypes.c_ulonglong),
    )


class Emulator:
    """The runtime and the kernels built so far, in one temporary folder.

    Attributes:
        seed: of the last launch; every launch takes the next one.
        edit: what is done to the C++ of kernels before they are compiled, to plant a fault.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.seed = folder, 0
        self.edit: Callable[[str], str] = lambda text: text
        self._built: dict[str, Any] = {}
        self._early: _EarlyStarts | None = None
        _compile([*_RUNTIME.glob("*.cpp")], folder / "libemulator.so", "-O2")
        self.runtime = ctypes.CDLL(str(folder / "libemulator.so"))
        self.runtime.emulator_start.restype = ctypes.c_void_p
        self.runtime.emulator_run.restype = ctypes.c_char_p
        self.runtime.emulator_run.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.runtime.emulator_free.argtypes = [ctypes.c_void_p]

    def build(self, source: str, defines: Defines, arch: str, cache: Path | None) -> jit.Built:
        """In the place of `jit.build`; what it returns is compiled when it is first launched."""
        return jit.Built(json.dumps([source, dict(defines)]).encode(), "emulated")

    def kernel(self, cubin: bytes, name: str, shared_bytes: int = 0) -> "EmulatedKernel":
        """In the place of `jit.Kernel`."""
        source, defines = json.loads(cubin)
        return EmulatedKernel(self, source, defines, name, shared_bytes)

    @contextmanager
    def starts(self, early: bool, *late: torch.Tensor) -> Iterator[None]:
        """Within, if `early`, a launch begins before the one before it has written anything, as far as both allow.

        `late` are what the launch before the first one writes: NaN until the first one waits for it. Outputs are
        there at the end of the context. If not `early`, no thread has to wait for a producer, as when it is long over.
        """
        if not early:
            yield
            return
        self._early = _EarlyStarts(late)
        try:
            yield
            self._early.finish()
        finally:
            self._early.abandon()
            self._early = None

    @contextmanager
    def fault(self, old: str, new: str) -> Iterator[None]:
        """Within, the kernels that contain `old` are built with `new` in its place; there must be one."""
        seen = False

        def edit(text: str) -> str:
            nonlocal seen
            seen = seen or old in text
            return text.replace(old, new)

        before, self.edit = self.edit, edit
        try:
            yield
        finally:
            self.edit = before
        if not seen:
            raise LookupError(f"no kernel contains {old}")

    def library(self, source: str, defines: Defines) -> Any:
        """The loaded kernel.

        Raises:
            CompileError: with the messages of g++.
        """
        text = self.edit(_unit(source))
        key = hashlib.sha256(json.dumps([text, sorted(defines.items())]).encode()).hexdigest()[:16]
        if key not in self._built:
            folder = self.folder / f"{Path(source).stem}-{key}"
            folder.mkdir(exist_ok=True)
            (folder / "kernel.cpp").write_text(text)
            flags = [
                "-O1",
                *_CHECKS,
                *(f"-D{name}={value}" for name, value in defines.items()),
                f"-I{_RUNTIME}",
            ]
            flags += [f"-L{self.folder}", "-lemulator", f"-Wl,-rpath,{self.folder}"]
            _compile([folder / "kernel.cpp"], folder / "kernel.so", *flags)
            self._built[key] = ctypes.CDLL(str(folder / "kernel.so"))
        return self._built[key]

    def launch(self, launch: "_Running", pdl: bool) -> None:
        """Runs to the end, or as far as `starts` allows."""
        try:
            if self._early is None:
                launch.run(_END)
            else:
                self._early.follow(launch, pdl)
        finally:
            if self._early is None:
                launch.free()


class _Running:
    """A launch that has begun."""

    def __init__(self, emulator: Emulator, source: str, call: Any, values: list[Any], **sizes: int) -> None:
        emulator.seed += 1
        self._name, self._runtime, self._values = f"{source}, seed {emulator.seed}", emulator.runtime, values
        self._arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._grid = emulator.runtime.emulator_start(
            ctypes.byref(
                _Launch(
                    ctypes.cast(call, ctypes.c_void_p),
                    ctypes.cast(self._arguments, ctypes.c_void_p),
                    seed=emulator.seed,
                    **sizes,
                )
            )
        )

    def run(self, *stations: int) -> None:
        for until in stations:
            problem = self._runtime.emulator_run(self._grid, until)
            if problem is not None:
                raise EmulationError(f"{self._name}: {problem.decode()}")

    def free(self) -> None:
        if self._grid:
            self._runtime.emulator_free(self._grid)
        self._grid = None


class _EarlyStarts:
    """A chain of launches of which the last has not got further than to where it waits for its producer."""

    def __init__(self, late: tuple[torch.Tensor, ...]) -> None:
        self._last: _Running | None = None
        self._late = [(tensor, tensor.clone()) for tensor in late]
        for tensor in late:
            tensor.fill_(torch.nan)

    def follow(self, launch: _Running, pdl: bool) -> None:
        before, self._last = self._last, launch
        try:
            if before is not None:
                before.run(_CONSUMER_MAY_START if pdl else _END)
            if pdl:
                launch.run(_PRODUCER_NEEDED)
            self._produce(before)
            if not pdl:
                launch.run(_END)
        finally:
            if before is not None:
                before.free()

    def finish(self) -> None:
        """Everything to its end."""
        self._produce(self._last)

    def abandon(self) -> None:
        """Frees what an error left behind."""
        if self._last is not None:
            self._last.free()

    def _produce(self, before: _Running | None) -> None:
        for tensor, content in self._late:
            tensor.copy_(content)
        self._late = []
        if before is not None:
            before.run(_END)


class EmulatedKernel:
    """One entry point, as `jit.Kernel`."""

    def __init__(
        self, emulator: Emulator, source: str, defines: Defines, name: str, shared_bytes: int
    ) -> None:
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
        """Launches, as `Kernel.launch`.

        Raises:
            EmulationError: a thread did what it must not do, or nothing gets done any more.
        """
        library = self._emulator.library(self._source, self._defines)
        sizes = [size for size in (ctypes.c_int * 64).in_dll(library, "emulator_sizes") if size]
        given = [ctypes.sizeof(kind) for kind in types]
        if sizes != given:
            raise EmulationError(f"{self._source} takes arguments of {sizes} bytes, not {given}")
        running = _Running(
            *(self._emulator, self._source, library.emulator_call),
            [kind(value) for kind, value in zip(types, values, strict=True)],
            grid_x=grid[0],
            grid_y=grid[1],
            threads=threads,
            cluster=cluster,
            shared_bytes=self._shared_bytes,
            pdl=int(pdl),
        )
        self._emulator.launch(running, pdl)


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


def _unit(source: str) -> str:
    """A translation unit: the kernel with all that it includes, in a namespace of its own."""
    folder, seen = jit._FOLDER, set()

    def inlined(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = translate((folder / name).read_text()).replace("#pragma once\n", "").split("\n")
        return "\n".join(
            inlined(line.split('"')[1]) if line.startswith("#include") else line for line in lines
        )

    name = Path(source).stem
    return _UNIT.format(kernel=inlined(source), name=name)


_UNIT = """#include "ptx.h"
namespace kernel {{
#include "builtins.h"
{kernel}
}}
#include "call.h"
extern "C" void emulator_call(void **arguments) {{ call(kernel::{name}, arguments); }}
extern "C" {{ int emulator_sizes[64]; }}
static const bool sized = sizes_of(kernel::{name}, emulator_sizes);
"""


def _compile(sources: list[Path], to: Path, *flags: str) -> None:
    assert COMPILER is not None
    command = [COMPILER, *_FLAGS, *map(str, sources), "-o", str(to), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise jit.CompileError(f"{' '.join(map(str, sources))}: {done.stderr[:4000]}")
