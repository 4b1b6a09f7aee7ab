# SPDX-License-Identifier: Apache-2.0
"""What a round costs apart from its bytes, learned from the times of rounds. Pure logic.

seconds = fixed + slope * bytes, fitted by least squares to rounds of different lengths; the gate needs fixed / slope:
the bytes that could be read in the time that every round takes anyway. One number suffices, as shorter rounds differ
from longer ones in bytes alone; it cannot describe a step in the times, such as a CUDA graph that one length lacks.
"""

import math

# Weight of the past when a round is added: about the last 300 rounds count.
_KEEP = 1 - 1 / 300
_ENOUGH = 50.0
# Spread of the bytes, over their mean, from which a slope can be told.
_SPREAD = 0.03
# A round that takes this many times the usual was interrupted.
_ODD = 3.0
# More fixed bytes than this many rounds' would mean that bytes hardly matter; the estimate is noise by then.
_MOST = 20.0


class RoundTimes:
    """Times of one server's rounds."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, cost: float, seconds: float) -> None:
        """One round of `cost` bytes that took `seconds`."""
        if self._count >= _ENOUGH and seconds > _ODD * self._y / self._count:
            return
        for name, value in (
            ("_count", 1.0),
            ("_x", cost),
            ("_y", seconds),
            ("_xx", cost * cost),
            ("_xy", cost * seconds),
        ):
            setattr(self, name, _KEEP * getattr(self, name) + value)

    def fixed(self) -> float:
        """Bytes that could be read in the fixed time of a round; 0 while the rounds cannot tell."""
        if self._count < _ENOUGH:
            return 0.0
        x, y = self._x / self._count, self._y / self._count
        variance = max(0.0, self._xx / self._count - x * x)
        if math.sqrt(variance) < _SPREAD * x:
            return 0.0
        slope = (self._xy / self._count - x * y) / variance
        if slope <= 0:
            return _MOST * x
        return min(max(0.0, y / slope - x), _MOST * x)
