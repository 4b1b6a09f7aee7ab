# SPDX-License-Identifier: Apache-2.0
"""Files written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError


def write_json(path: Path, content: Any) -> None:
    """Writes JSON so that a reader sees the old file or the whole new one.

    Raises:
        LingError: the file cannot be written.
    """
    try:
        write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise LingError(f"{path}: {error.strerror}; make room for it or choose another --out") from None


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text so that a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
