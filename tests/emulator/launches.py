# SPDX-License-Identifier: Apache-2.0
"""Launches that have begun, and chains of them in which each begins early."""

import ctypes
from typing import Any

import torch

PRODUCER_NEEDED, CONSUMER_MAY_START, END = range(3)  # Grid::Until of runtime/grid.h


class EmulationError(AssertionError):
    """A kernel did what it must not do; the message says which thread did what."""


class _Launch(ctypes.Structure):
    """struct Launch of runtime/grid.h."""

    _fields_ = (
        *(("call", ctypes.c_void_p), ("arguments", ctypes.c_void_p)),
        *(("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint)),
        *(("threads", ctypes.c_uint), ("cluster", ctypes.c_uint)),
        *(("shared_bytes", ctypes.c_uint), ("pdl", ctypes.c_uint)),
        ("seed", ctypes.c_ulonglong),
    )


class Running:
    """One launch; `sizes` are the integers of `_Launch`."""

    def __init__(self, runtime: Any, name: str, call: Any, values: list[Any], **sizes: int) -> None:
        self._runtime, self._name, self._values = runtime, name, values
        self._arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        pointers = ctypes.cast(call, ctypes.c_void_p), ctypes.cast(self._arguments, ctypes.c_void_p)
        runtime.emulator_start.restype = ctypes.c_void_p
        runtime.emulator_run.restype = ctypes.c_char_p
        self._grid: int | None = runtime.emulator_start(ctypes.byref(_Launch(*pointers, **sizes)))

    def run(self, until: int) -> None:
        """Goes on until that.

        Raises:
            EmulationError: a thread did what it must not do, or nothing gets done any more.
        """
        problem = self._runtime.emulator_run(ctypes.c_void_p(self._grid), until)
        if problem is not None:
            raise EmulationError(f"{self._name}: {problem.decode()}")

    def free(self) -> None:
        """Gives its memory back; nothing else may be asked of it."""
        if self._grid is not None:
            self._runtime.emulator_free(ctypes.c_void_p(self._grid))
        self._grid = None


class EarlyStarts:
    """A chain of launches of which the last has come no further than to where it waits for its producer.

    `late` is what the launch before the first one writes: NaN until that is waited for.
    """

    def __init__(self, late: tuple[torch.Tensor, ...]) -> None:
        self._last: Running | None = None
        self._late = [(tensor, tensor.clone()) for tensor in late]
        for tensor in late:
            tensor.fill_(torch.nan)

    def follow(self, launch: Running, pdl: bool) -> None:
        """Begins `launch` as soon as the one before allows it, and only then lets that one go on to its end."""
        before, self._last = self._last, launch
        try:
            if before is not None:
                before.run(CONSUMER_MAY_START if pdl else END)
            if pdl:
                launch.run(PRODUCER_NEEDED)
            self._produce(before)
            if not pdl:
                launch.run(END)
        finally:
            if before is not None:
                before.free()

    def finish(self) -> None:
        """Everything to its end."""
        self._produce(self._last)

    def free(self) -> None:
        """Gives back what is left, after an error too."""
        if self._last is not None:
            self._last.free()

    def _produce(self, before: Running | None) -> None:
        for tensor, content in self._late:
            tensor.copy_(content)
        self._late = []
        if before is not None:
            before.run(END)
