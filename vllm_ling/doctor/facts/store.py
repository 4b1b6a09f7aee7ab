# SPDX-License-Identifier: Apache-2.0
"""Facts: named values with their origin, and for what could not be found the reason why."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from vllm_ling.doctor.text import clean

Source = Literal["static", "log", "live", "bench"]


class MissingFact(Exception):
    """A check asked for a fact that no source could give; the message says why."""


class Facts:
    """What is known. The first source to state a fact wins, so sources are read live first, then log, then flags."""

    def __init__(self) -> None:
        self.sources: set[Source] = set()
        self._known: dict[str, tuple[Any, str]] = {}
        self._reasons: dict[str, list[str]] = {}
        self._withheld: Mapping[str, str] = {}

    @contextmanager
    def withholding(self, reasons: Mapping[str, str]) -> Iterator[None]:
        """While it lasts, these keys cannot be stated: their source does not say what it used to say."""
        self._withheld = reasons
        for key, reason in reasons.items():
            self.lacks(key, reason)
        try:
            yield
        finally:
            self._withheld = {}

    def put(self, key: str, value: Any, origin: str) -> None:
        """States a fact unless one is already known."""
        if key not in self._withheld:
            self._known.setdefault(key, (value, origin))

    def lacks(self, key: str, reason: str) -> None:
        """Records why a source could not state `key` (or the keys below it, `prefix.`)."""
        reasons = self._reasons.setdefault(key, [])
        if reason not in reasons:
            reasons.append(clean(reason))

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        """The value of a fact.

        Raises:
            MissingFact: with the reasons that the sources gave.
        """
        if key in self._known:
            return self._known[key][0]
        prefixes = [key.rsplit(".", cut)[0] + "." for cut in range(1, key.count(".") + 1)]
        reasons = [reason for name in (key, *prefixes) for reason in self._reasons.get(name, [])]
        raise MissingFact("; ".join(dict.fromkeys(reasons)) or f"{key} is not known")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a fact that a check can do without."""
        return self._known[key][0] if key in self._known else default

    def origin(self, key: str) -> str:
        """Where a known fact comes from."""
        return self._known[key][1] if key in self._known else "not known"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: values with origins, and what is missing with reasons. Keys starting with `_` stay inside."""
        known = {
            key: {"value": _plain(value), "origin": origin}
            for key, (value, origin) in sorted(self._known.items())
            if not key.startswith("_")
        }
        return {"known": known, "missing": dict(sorted(self._reasons.items()))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {clean(key): _plain(item) for key, item in list(value.items())[:200]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in list(value)[:200]]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean(value)
