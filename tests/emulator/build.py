# SPDX-License-Identifier: Apache-2.0
"""Compiles the emulator's runtime and CUDA kernels for the CPU with g++."""

import ctypes
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.emulator.translate import translate
from vllm_ling.quant.jit import CompileError

COMPILER = shutil.which("g++")
KERNELS = Path(__file__).parents[2] / "quant" / "kernels"
Defines = Mapping[str, int | str]
_RUNTIME = Path(__file__).parent / "runtime"
_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-w",
    "-U_FORTIFY_SOURCE",
)  # fortified, longjmp refuses other stacks
_KERNEL = (
    "-O1",
    *("-fno-exceptions", "-fno-strict-aliasing", "-fno-gnu-unique", "-ffp-contract=off"),
    # What a GPU would not do, or not notice: a trap, which the runtime reports with the thread that met it.
    *("-fsanitize=alignment,integer-divide-by-zero,shift", "-fsanitize-undefined-trap-on-error"),
)
_UNIT = """#include "device.h"
#include "ptx.h"
namespace kernel {{
#include "builtins.h"
{kernel}
}}
#include "call.h"
extern "C" {{
int emulator_sizes[64];
void emulator_call(void **arguments) {{ call(kernel::{name}, arguments); }}
}}
static const bool sized = sizes_of(kernel::{name}, emulator_sizes);
"""


class Builder:
    """What was built so far, in one temporary folder; each variant of a kernel once.

    Attributes:
        runtime: the loaded libemulator.so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, Any] = {}
        self._fault: tuple[str, str] | None = None
        self._fault_found = False
        _compile(sorted(_RUNTIME.glob("*.cpp")), folder / "libemulator.so", "-O2")
        self.runtime: Any = ctypes.CDLL(str(folder / "libemulator.so"))

    @contextmanager
    def fault(self, old: str, new: str) -> Iterator[None]:
        """Within, kernels are built from sources with `new` in the place of `old`.

        Raises:
            LookupError: none of them contained `old`.
        """
        self._fault, self._fault_found = (old, new), False
        try:
            yield
        finally:
            self._fault = None
        if not self._fault_found:
            raise LookupError(f"no kernel contains {old}")

    def library(self, source: str, defines: Defines) -> Any:
        """The loaded kernel; `source`: a file in quant/kernels/, or any by its whole path.

        Raises:
            CompileError: with the messages of g++.
            TranslationError: the source uses a form that the emulator does not know.
        """
        text = _UNIT.format(kernel=_with_includes(source, set()), name=Path(source).stem)
        if self._fault is not None:
            self._fault_found |= self._fault[0] in text
            text = text.replace(*self._fault)
        key = hashlib.sha256(json.dumps([text, sorted(defines.items())]).encode()).hexdigest()[:16]
        if key not in self._built:
            folder = self._folder / f"{Path(source).stem}-{key}"
            folder.mkdir(exist_ok=True)
            (folder / "kernel.cpp").write_text(text)
            flags = [*_KERNEL, *(f"-D{name}={value}" for name, value in defines.items()), f"-I{_RUNTIME}"]
            flags += [f"-L{self._folder}", "-lemulator", f"-Wl,-rpath,{self._folder}"]
            _compile([folder / "kernel.cpp"], folder / "kernel.so", *flags)
            self._built[key] = ctypes.CDLL(str(folder / "kernel.so"))
        return self._built[key]


def _with_includes(name: str, seen: set[str]) -> str:
    """A kernel's translated source with those of what it includes, each once."""
    if name in seen:
        return ""
    seen.add(name)
    lines = translate((KERNELS / name).read_text()).replace("#pragma once\n", "").split("\n")
    return "\n".join(
        _with_includes(line.split('"')[1], seen) if line.startswith("#include") else line for line in lines
    )


def _compile(sources: list[Path], to: Path, *flags: str) -> None:
    if COMPILER is None:
        raise CompileError("g++ was not found")
    command = [COMPILER, *_COMMON, *map(str, sources), "-o", str(to), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{' '.join(map(str, sources))}: {done.stderr[:4000]}")
