# SPDX-License-Identifier: Apache-2.0
"""Result schema of the demo, and its table."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table


class StageResult(BaseModel):
    """One row of `build/demo.json`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    accuracy: float = Field(description="Share of answered problems whose final number is right.")
    items: int = Field(
        description="Answered problems; transport errors are counted apart, in the provenance."
    )
    accept_length: float | None = Field(description="1 + accepted / drafts; null without speculation.")
    tok_per_s: float = Field(description="Decoded tokens per second of requests sent one at a time.")
    tpot_ms: float = Field(
        description="Median time per output token after the first, requests one at a time."
    )
    ttft_ms: float = Field(description="Median time to first token, requests one at a time.")
    median_output_tokens: float = Field(description="Median output length in tokens, end token included.")
    flagged: bool = Field(description="Whether a proof at load reported a FAULT.")


class DemoReport(BaseModel):
    """All of `build/demo.json`."""

    model_config = ConfigDict(extra="forbid")

    provenance: dict[str, Any]
    stages: list[StageResult]


def stage_table(rows: Sequence[tuple[StageResult, str]]) -> Table:
    """The results with what each stage adds; flagged rows are red."""
    table = Table(title="tiny-ling, one change at a time")
    for heading in ("stage", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in ("accuracy", "tok/s", "TPOT ms", "TTFT ms", "accept length", "median tokens", "proof"):
        table.add_column(heading, justify="right")
    for row, adds in rows:
        table.add_row(
            row.name,
            adds,
            f"{row.accuracy:.1%}",
            f"{row.tok_per_s:.1f}",
            f"{row.tpot_ms:.1f}",
            f"{row.ttft_ms:.0f}",
            "-" if row.accept_length is None else f"{row.accept_length:.2f}",
            f"{row.median_output_tokens:g}",
            "FAULT" if row.flagged else "ok",
            style="bold red" if row.flagged else None,
        )
    return table
