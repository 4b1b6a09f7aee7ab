# SPDX-License-Identifier: Apache-2.0
"""Foreign text made safe to show: one line, printable, bounded."""

LIMIT = 300


def clean(text: object, limit: int = LIMIT) -> str:
    """`text` without control characters (terminal escapes included), at most `limit` characters."""
    plain = str(text)[: 4 * limit]
    shown = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in plain)
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
