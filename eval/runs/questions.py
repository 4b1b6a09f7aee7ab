# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from jsonl files: GSM8K's own format, and the held-out problems'."""

import json
from pathlib import Path

from vllm_ling.errors import LingError


def read_rows(path: Path) -> list[dict[str, str]]:
    """Questions and answers from a jsonl file.

    Raises:
        LingError: naming the file, and the line that has no question and answer.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LingError(f"{path}: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append({"question": str(row["question"]), "answer": str(row["answer"])})
        except (ValueError, KeyError, TypeError):
            raise LingError(f"{path}: line {number} is not JSON with a question and an answer") from None
    if not rows:
        raise LingError(f"{path}: no questions")
    return rows
