# SPDX-License-Identifier: Apache-2.0
"""Measured times of speculative rounds, from a result of `vllm-ling bench decode`, as costs of a replay.

A round that drafts j tokens is charged the measured time of a round of j drafts, nothing else: what it would take to
decide on the length between two drafts is not in it, nor that the MTP layer must also be shown the tokens of rounds
that draft nothing. At which accept length a round was timed is of no account, as the same kernels run whatever is
accepted; vLLM gives a whole length, such as 2, to every round alike, so that no lots make the figure noisy.

    vllm-ling bench decode --draft 0 --draft 1 --draft 2 --draft 3 --draft 4 --accept-length 2 --out h200-rounds.json
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.spec_decode.gate import Costs

# A result's accept length may differ from the one asked for by this share: it is drawn by lot.
_NOISE = 0.1


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of a round of 0, 1, 2, ... drafts, end to end, and where they come from.

    Attributes:
        ms, spread_ms: median of the repeats; lowest and highest.
        source: file, context, its origin, and the engines' options and clocks.
    """

    ms: list[float]
    spread_ms: list[tuple[float, float]]
    source: dict[str, Any]

    def costs(self) -> Costs:
        """For the gate: one draft more costs the difference of two rounds, drafting and verifying in one."""
        return Costs([0.0, *self.ms], 0.0)

    def as_data(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "rule": "a round that drafts j tokens costs the measured round of j drafts, and nothing else",
            "round_ms": {str(k): ms for k, ms in enumerate(self.ms)},
            "spread_ms": {str(k): list(spread) for k, spread in enumerate(self.spread_ms)},
            "source": self.source,
        }


def read_round_times(path: Path, most: int) -> RoundTimes:
    """Rounds of 0 to `most` drafts of the side "ours", at the shortest context that has all of them.

    Raises:
        LingError: no such file or result, a draft length that is missing or failed, engines with different options,
            or an accept length that was not seen.
    """
    try:
        text = path.read_text(encoding="utf-8")
        result = json.loads(text)
        rows, engines = result["rows"], result["engines"]
        known = [(row["context"], k, row) for row in rows if (k := _drafts(row["workload"])) is not None]
        found = {(context, k): row for context, k, row in known}
        if len(found) < len(known):
            raise LingError(
                f"{path}: rounds of as many drafts were measured at several accept lengths; keep one"
            )
        contexts = sorted({context for context, _ in found})
        whole = [at for at in contexts if all((at, k) in found for k in range(most + 1))]
        if not whole:
            raise LingError(
                f"{path}: no context has rounds of 0 to {most} drafts; bench decode --draft measures them"
            )
        chosen = [found[whole[0], k] for k in range(most + 1)]
        used = [engines[f"ours {row['workload']}"] for row in chosen]
        if any(engine["options"] != used[0]["options"] for engine in used):
            raise LingError(f"{path}: the rounds were measured with different options")
        rounds = [_round(path, row, engine) for row, engine in zip(chosen, used, strict=True)]
        source = {
            "file": path.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "context": whole[0],
            "provenance": result["provenance"],
            "engines": [
                {
                    name: engine[name]
                    for name in ("options", "model", "layers", "accept_length", "clocks", "date")
                }
                for engine in used
            ],
        }
    except OSError as error:
        raise LingError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise LingError(f"{path}: no result of bench decode ({type(error).__name__}: {error})") from None
    return RoundTimes([ms for ms, _ in rounds], [spread for _, spread in rounds], source)


def _drafts(workload: str) -> int | None:
    """Draft tokens of a workload's name, such as plain or mtp3@1; None for another."""
    match = re.fullmatch(r"mtp(\d+)@[\d.]+", workload)
    return 0 if workload == "plain" else int(match[1]) if match else None


def _round(path: Path, row: dict[str, Any], engine: dict[str, Any]) -> tuple[float, tuple[float, float]]:
    """Milliseconds of a round: those of a token times the tokens of a round."""
    what = f"{path}: {row['workload']}"
    ms, spread = row["ms_per_token"], row["spread_ms"]
    if ms is None or spread is None:
        raise LingError(f"{what} was not measured")
    tokens = 1.0
    if engine["draft_tokens"]:
        seen, asked = row.get("accept_length_seen"), float(engine["accept_length"])
        if seen is None or abs(seen - asked) > _NOISE * asked:
            raise LingError(f"{what}: accept length {asked:g} was asked for, and {seen or 'none'} was seen")
        tokens = asked if asked.is_integer() else float(seen)
    return ms * tokens, (spread[0] * tokens, spread[1] * tokens)
