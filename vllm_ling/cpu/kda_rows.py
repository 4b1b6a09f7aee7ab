# SPDX-License-Identifier: Apache-2.0
"""What a batch asks of every KDA layer: which tokens form a row, where its state is read and where it is written.

vLLM keeps one state per slot (a cache block). Without speculation a request owns one slot. With k draft tokens it owns
k + 1, in a table row: the state after the i-th token of a step goes to slot i, and the next step starts from the slot
of the last accepted token. The convolution keeps its recent inputs in slot 0 only, as a window that the number of
accepted tokens shifts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vllm_ling.cpu.kda_math import CHUNK


@dataclass(frozen=True)
class StepRows:
    """Rows of equally many tokens that advance token by token: decodes and draft verification.

    Attributes:
        tokens: the rows' tokens in the batch, row after row.
        length: tokens per row.
        read: per row, the slot of the state to start from.
        write: per row and token, the slot of the state after it.
        history: index ([rows, 1], [rows, W - 1]) of the convolution inputs before each row's first token.
        window: index ([rows, 1], [1, W - 2 + length]) of the convolution inputs to keep.
        fresh: slots to zero first, of requests that have no past.
    """

    tokens: slice | Tensor
    length: int
    read: list[int]
    write: list[list[int]]
    history: tuple[Tensor, Tensor]
    window: tuple[Tensor, Tensor]
    fresh: list[int]


@dataclass(frozen=True)
class PrefillRow:
    """One prompt, or a part of one: tokens [start, stop) of the batch, a slot, and whether the slot holds its past."""

    start: int
    stop: int
    slot: int
    resumed: bool


@dataclass(frozen=True)
class PrefillRows:
    """Rows that are computed in chunks, longest first.

    Attributes:
        rows: longest first.
        tokens: the rows' tokens in the batch, row after row.
        places: [tokens] position of each token in the flattened [chunks, CHUNK] layout of `kda_math.kda_chunks`.
        active: rows that take part in each round of chunks.
    """

    rows: list[PrefillRow]
    tokens: slice | Tensor
    places: Tensor
    active: list[int]


@dataclass(frozen=True)
class KdaRows:
    """A batch: its token count and its rows."""

    tokens: int
    steps: list[StepRows]
    prefill: PrefillRows | None


def plan_rows(
    starts: Sequence[int],
    past: Sequence[int],
    slots: Sequence[Sequence[int]],
    accepted: Sequence[int] | None,
    drafts: Sequence[int] | None,
    conv_width: int,
) -> KdaRows:
    """Sorts the requests of a batch into rows.

    Args:
        starts: first token of each request in the batch, and the end of the last; empty requests are padding.
        past: tokens of each request that were computed before.
        slots: table of cache slots per request, at least as many as it has tokens to verify.
        accepted: tokens of each request's previous step that were kept, at least 1; None without speculation.
        drafts: draft tokens to verify per request, negative where it is none of a verification; None likewise.
        conv_width: taps W of the short convolution.
    """
    steps: dict[int, list[tuple[int, int, int]]] = {}
    prefill: list[PrefillRow] = []
    for request, (start, stop) in enumerate(pairwise(starts)):
        length = stop - start
        if length == 0:
            continue
        verified = drafts is not None and drafts[request] >= 0
        if verified or length == 1:
            offset = 0
            # A request without a past is verified when vLLM pads a one-token prompt to the length of a verification.
            if verified and past[request] and accepted is not None:
                offset = max(accepted[request], 1) - 1
            steps.setdefault(length, []).append((request, start, offset))
        else:
            prefill.append(PrefillRow(start, stop, slots[request][0], past[request] > 0))
    return KdaRows(
        tokens=starts[-1],
        steps=[_step_rows(length, rows, past, slots, conv_width) for length, rows in steps.items()],
        prefill=_prefill_rows(prefill) if prefill else None,
    )


def _step_rows(
    length: int,
    rows: list[tuple[int, int, int]],
    past: Sequence[int],
    slots: Sequence[Sequence[int]],
    conv_width: int,
) -> StepRows:
    first = torch.tensor([slots[request][0] for request, _, _ in rows]).unsqueeze(1)
    offsets = torch.tensor([offset for _, _, offset in rows]).unsqueeze(1)
    return StepRows(
        tokens=_tokens([(start, start + length) for _, start, _ in rows]),
        length=length,
        read=[slots[request][offset] for request, _, offset in rows],
        write=[list(slots[request][:length]) for request, _, _ in rows],
        history=(first, offsets + torch.arange(conv_width - 1)),
        window=(first, torch.arange(conv_width - 2 + length).unsqueeze(0)),
        fresh=[slots[request][0] for request, _, _ in rows if not past[request]],
    )


def _prefill_rows(rows: list[PrefillRow]) -> PrefillRows:
    rows = sorted(rows, key=lambda row: row.start - row.stop)
    chunks = [-(-(row.stop - row.start) // CHUNK) for row in rows]
    active = [sum(count > round_ for count in chunks) for round_ in range(chunks[0])]
    first_chunk = torch.tensor([0, *active]).cumsum(0)
    places = []
    for index, row in enumerate(rows):
        offset = torch.arange(row.stop - row.start)
        places.append((first_chunk[offset // CHUNK] + index) * CHUNK + offset % CHUNK)
    return PrefillRows(
        rows=rows,
        tokens=_tokens([(row.start, row.stop) for row in rows]),
        places=torch.cat(places),
        active=active,
    )


def _tokens(ranges: list[tuple[int, int]]) -> slice | Tensor:
    """A slice where the ranges follow each other, which makes every later access a view."""
    if all(left[1] == right[0] for left, right in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])
