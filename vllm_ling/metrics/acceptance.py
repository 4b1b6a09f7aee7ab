# SPDX-License-Identifier: Apache-2.0
"""Rolling accept length: drafts and accepted draft tokens of the last minute, in seconds-wide buckets."""

import time
from collections import deque
from collections.abc import Callable

from vllm_ling.metrics.names import WINDOW_S


class AcceptanceWindow:
    """Sums over the last `window_s` seconds.

    Args:
        window_s: width of the window in seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
        self._buckets: deque[list[float]] = deque()

    def add(self, drafts: int, accepted: int) -> None:
        """Counts one step's drafts (verified sequences) and accepted draft tokens."""
        now = self._clock()
        if self._buckets and now - self._buckets[-1][0] < 1.0:
            self._buckets[-1][1] += drafts
            self._buckets[-1][2] += accepted
        else:
            self._buckets.append([now, drafts, accepted])
        self._forget(now)

    def accept_length(self) -> float | None:
        """Tokens per verify step, 1 + accepted / drafts; None if nothing was drafted in the window."""
        self._forget(self._clock())
        drafts = sum(bucket[1] for bucket in self._buckets)
        return 1 + sum(bucket[2] for bucket in self._buckets) / drafts if drafts else None

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] > self._window_s:
            self._buckets.popleft()
