# SPDX-License-Identifier: Apache-2.0
"""Numbers about drafts that come from outside, checked before anything is sized or judged by them."""

import math
import re

MOST_DRAFT_TOKENS = 64


def draft_tokens(value: object) -> int:
    """Draft tokens per round.

    Raises:
        ValueError: not a whole number, or more than anybody drafts (a list of that many positions is never made).
    """
    text = str(value)
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) > MOST_DRAFT_TOKENS:
        raise ValueError(f"{text[:40]!r} is not a number from 0 to {MOST_DRAFT_TOKENS}")
    return int(text)


def accept_length(accepted: float, drafts: float, k: int) -> float:
    """Tokens per verify step: 1 to k + 1.

    Raises:
        ValueError: the counts contradict each other. Half a token is left for counters read while they move.
    """
    length = 1 + accepted / drafts
    if not math.isfinite(drafts) or not 1 <= length <= k + 1.5:
        raise ValueError(f"{accepted:g} tokens accepted of {drafts:g} drafts of {k}")
    return length
