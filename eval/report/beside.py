# SPDX-License-Identifier: Apache-2.0
"""The readable forms of a result, made of its file alone: `.md` and `.svg` beside the JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_text

Render = Callable[[dict[str, Any]], str]


def write_beside(path: Path, command: str, markdown: Render, plot: Render) -> str:
    """Writes both and returns the markdown text; no `.svg` where `plot` gives "".

    Args:
        path: the JSON file.
        command: that writes such files, for messages.

    Raises:
        LingError: the file is missing or no result of `command`.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        text, drawing = markdown(result), plot(result)
    except OSError as error:
        raise LingError(f"{path}: cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise LingError(f"{path}: no result of {command} ({type(error).__name__}: {error})") from None
    write_text(path.with_suffix(".md"), text)
    if drawing:
        write_text(path.with_suffix(".svg"), drawing)
    return text
