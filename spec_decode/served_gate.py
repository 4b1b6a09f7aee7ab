# SPDX-License-Identifier: Apache-2.0
"""The gate in a server: follows requests from round to round, between scheduler and model runner. No vLLM in here."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from vllm_ling.spec_decode.gate import Costs, DraftGate, Outcome
from vllm_ling.spec_decode.round_times import RoundTimes

# Of a number of requests: the numbers that are allowed (see `DraftGate`), None for any.
Allowed = Callable[[int], Collection[int] | None]


class ServedGate:
    """One engine's gate; calls come in the order begin, end, trim, once a step; `rest` for a step without tokens.

    Args:
        gate: decides.
        costs: what `gate` decides by.
        read: `DraftConfidence.read` of the draft.
        steps: numbers of draft steps that can be taken with so many requests.
        lengths: numbers of draft tokens that so many requests may share; None lets each have its own.
        times: where the times of rounds are to count as well.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        gate: DraftGate,
        costs: Costs,
        read: Callable[[int, int], list[list[float]]],
        *,
        steps: Allowed = lambda requests: None,
        lengths: Allowed = lambda requests: None,
        times: RoundTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate, self._costs, self._read = gate, costs, read
        self._steps, self._lengths = steps, lengths
        self._times, self._clock = times, clock
        # The draft's probabilities of tokens that wait for their verification, by request.
        self._drafted: dict[str, list[float]] = {}
        self._round: dict[str, tuple[list[float], int]] = {}
        # When the round before began and what it cost, if it was a round of decodes only.
        self._before: tuple[float, float] | None = None

    def begin(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        finished: Iterable[str],
    ) -> int:
        """A step starts.

        Args:
            scheduled: tokens of each request in it.
            drafts: draft tokens of each request in it, without those that have none.
            finished: requests that are gone.

        Returns:
            How many tokens to draft at its end.
        """
        self._forget(finished)
        for request, tokens in scheduled.items():
            probabilities, verified = self._drafted.pop(request, None), len(drafts.get(request, ()))
            # Others are prompts, or verify what was not drafted: vLLM pads some with placeholders.
            if probabilities is not None and tokens == verified + 1 and verified <= len(probabilities):
                self._round[request] = (probabilities, verified)
        # Beside a prompt a round teaches the same; only its time is not its own.
        decodes_only = len(self._round) == len(scheduled) > 0
        least = min(self._lengths(len(scheduled)) or (1,))
        steps = self._gate.steps(self._steps(len(scheduled)), least)
        self._measure(decodes_only, sum(scheduled.values()), steps)
        return steps

    def rest(self, finished: Iterable[str]) -> None:
        """A step without tokens: requests may end in it, and what follows is no round right after the one before."""
        self._forget(finished)
        self._before = None

    def _forget(self, finished: Iterable[str]) -> None:
        for request in finished:
            self._drafted.pop(request, None)
        self._round = {}

    def _measure(self, decodes_only: bool, tokens: int, steps: int) -> None:
        """Rounds that follow each other without a pause take from start to start."""
        if self._times is None:
            return
        now = self._clock()
        if decodes_only and self._before is not None:
            began, cost = self._before
            self._times.add(cost, now - began)
            self._gate.set_fixed(self._times.fixed())
        self._before = (now, self._costs.step(tokens) + steps * self._costs.draft) if decodes_only else None

    def end(self, emitted: Mapping[str, Sequence[int]]) -> None:
        """The step's tokens of each request: its accepted drafts and one more; none where nothing is sampled yet."""
        outcomes = [
            Outcome(probabilities, verified, min(len(emitted[request]) - 1, verified))
            for request, (probabilities, verified) in self._round.items()
            if emitted.get(request)
        ]
        self._gate.observe(outcomes)
        self._round = {}

    def trim(self, requests: Sequence[str], drafts: Sequence[list[int]]) -> list[list[int]]:
        """The beginning of each request's draft that is worth verifying."""
        longest = max(map(len, drafts), default=0)
        if not longest:
            return list(drafts)
        rows = self._read(len(requests), longest)
        batch = [row[: len(draft)] for row, draft in zip(rows, drafts, strict=True)]
        kept = self._gate.allot(batch, self._lengths(len(requests)))
        self._drafted.update(zip(requests, batch, strict=True))
        return [draft[:count] for draft, count in zip(drafts, kept, strict=True)]
