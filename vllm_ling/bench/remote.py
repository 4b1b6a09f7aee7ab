# SPDX-License-Identifier: Apache-2.0
"""Runs functions where a running engine is, which by default is another process than the caller's.

vLLM sends a function of a module by its name, so the engine's process imports that module and what the module keeps is
kept there: here the looks that are open. Only plain data comes back. Calls run on the thread that steps the engine,
between two steps.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
# A context manager that is entered before something runs, and gives what it saw by the time it is left.
Look = Callable[..., AbstractContextManager[Callable[[], Any]]]

_OPEN: list[tuple[AbstractContextManager[Callable[[], Any]], Callable[[], Any]]] = []


def ask(llm: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(worker, *args)` returns where the engine is; it lies in a module, and `llm` has one worker.

    Raises:
        Exception: what it raised, of another process only the text.
    """
    (found,) = llm.collective_rpc(function, args=args)
    return found


def during(llm: Any, act: Callable[[], T], look: Look, *args: Any) -> tuple[T, Any]:
    """Runs `act()` here while `look(*args)` is open where the engine is. Returns what each of them gave."""
    ask(llm, _begin, look, *args)
    try:
        acted = act()
    finally:
        seen = ask(llm, _end)
    return acted, seen


def _begin(worker: Any, look: Look, *args: Any) -> None:
    manager = look(*args)
    _OPEN.append((manager, manager.__enter__()))


def _end(worker: Any) -> Any:
    manager, seen = _OPEN.pop()
    manager.__exit__(None, None, None)
    return seen()
