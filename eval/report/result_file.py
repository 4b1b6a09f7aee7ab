# SPDX-License-Identifier: Apache-2.0
"""Result files of evaluations: items with their outcome and times, and the summary that follows from them."""

import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ling.errors import LingError


class Item(BaseModel):
    """One request. Times in seconds but `tpot_ms`; what was not measured is None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    correct: bool | None = Field(
        description="None if nothing is judged: no answer came, or it has no right one."
    )
    invalid: bool = Field(False, description="An answer without a final number; counts as wrong.")
    truncated: bool = Field(False, description="Cut at the token limit; judged as it is.")
    error: str | None = Field(None, description="Transport error: no answer came; never counts as wrong.")
    note: str | None = Field(None, description="An oddity: tries it took, or why its figures are missing.")
    prompt_tokens: int | None = Field(None, ge=0)
    output_tokens: int | None = Field(None, ge=0)
    ttft_s: float | None = Field(None, ge=0)
    tpot_ms: float | None = Field(None, ge=0)
    latency_s: float | None = Field(None, ge=0, description="Request sent to last token.")
    chunks: list[int] | None = Field(
        None, description="Tokens of each streamed chunk; with speculation a chunk is a round."
    )
    drafts: int | None = Field(None, ge=0, description="Draft rounds.")
    accepted: int | None = Field(None, ge=0, description="Accepted draft tokens.")
    accepted_at: list[int] | None = Field(
        None, description="Rounds that accepted draft position 1, 2, ..., k."
    )


class Summary(BaseModel):
    """What the items add up to. Shares from 0 to 1; means over the items that have the figure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    items: int
    accuracy: float | None
    invalid: int
    truncated: int
    transport_errors: int
    unmeasured: int = Field(description="Answered, but with token counts that cannot be right.")
    tok_per_s: float | None
    tpot_ms: float | None
    ttft_ms: float | None
    latency_s_mean: float | None
    latency_s_p95: float | None
    accept_length: float | None
    acceptance: list[float] | None = Field(description="Share of rounds that accepted position 1, 2, ..., k.")


class ResultFile(BaseModel):
    """A whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1]
    provenance: dict[str, Any]
    summary: Summary
    items: list[Item]


def summarize(items: Sequence[Item]) -> Summary:
    """The summary of `items`. Decode speed is output tokens after the first chunk over the time after it."""
    judged = [item for item in items if item.correct is not None]
    rounds = sum(item.drafts or 0 for item in items)
    positions = [item.accepted_at for item in items if item.accepted_at]
    tokens = seconds = 0.0
    for item in items:
        if item.output_tokens and item.latency_s is not None and item.ttft_s is not None:
            tokens += item.output_tokens - (item.chunks[0] if item.chunks else 1)
            seconds += item.latency_s - item.ttft_s
    return Summary(
        items=len(items),
        accuracy=sum(bool(item.correct) for item in judged) / len(judged) if judged else None,
        invalid=sum(item.invalid for item in items),
        truncated=sum(item.truncated for item in items),
        transport_errors=sum(item.error is not None for item in items),
        unmeasured=sum(item.error is None and item.output_tokens is None for item in items),
        tok_per_s=tokens / seconds if seconds > 0 else None,
        tpot_ms=_mean([item.tpot_ms for item in items]),
        ttft_ms=_mean([None if item.ttft_s is None else 1e3 * item.ttft_s for item in items]),
        latency_s_mean=_mean([item.latency_s for item in items]),
        latency_s_p95=percentile([item.latency_s for item in items if item.latency_s is not None], 0.95),
        accept_length=1 + sum(item.accepted or 0 for item in items) / rounds if rounds else None,
        acceptance=[sum(at) / rounds for at in zip_longest(*positions, fillvalue=0)]
        if rounds and positions
        else None,
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed (nearest rank); None of no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def make(provenance: dict[str, Any], items: Sequence[Item]) -> ResultFile:
    """A file of `items` with the summary that follows from them."""
    return ResultFile(schema_version=1, provenance=provenance, summary=summarize(items), items=list(items))


def load(path: Path) -> ResultFile:
    """Reads and checks a file.

    Raises:
        LingError: not readable, not a result file (with the field), two items of one id, or a summary that does not
            follow from the items.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LingError(f"{path}: not a readable JSON file: {error}") from None
    try:
        found = ResultFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise LingError(f"{path}: {field}: {first['msg']}") from None
    ids = [item.id for item in found.items]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise LingError(f"{path}: item {twice!r} is there twice")
    expected = summarize(found.items)
    for name, value in expected.model_dump().items():
        stored = getattr(found.summary, name)
        if not _agree(value, stored):
            raise LingError(f"{path}: summary.{name} is {stored}, but the items give {value}")
    return found


def _agree(value: Any, stored: Any) -> bool:
    """Equal, but for the last digits of figures that were written and read again."""
    if isinstance(value, list) and isinstance(stored, list) and len(value) == len(stored):
        return all(map(_agree, value, stored))
    if isinstance(value, float) and isinstance(stored, float):
        return math.isclose(value, stored, rel_tol=1e-9)
    return bool(value == stored)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None
