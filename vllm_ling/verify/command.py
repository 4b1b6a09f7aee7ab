# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling verify` from its options to the exit code."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_ling.checkpoint.locate import TINY_LING
from vllm_ling.errors import LingError
from vllm_ling.eval.interrupt import interruptible
from vllm_ling.eval.runs.lm_tasks import TaskName
from vllm_ling.verify.run import run
from vllm_ling.verify.settings import PARTS, Verification, detect_device

_TINY_ANSWER = 160  # tiny-ling's answers are short, and its context is


def verify(
    model: str,
    serve: Sequence[str],
    parts: str,
    out: Path,
    *,
    restart: bool = False,
    reference: str | None = None,
    task: TaskName | None = None,
    data: Path | None = None,
    fewshot_data: Path | None = None,
    max_tokens: int | None = None,
    **more: Any,
) -> int:
    """Returns 0 ok, 1 warn, 2 fail, 3 unknown, or 128 + signal if stopped; finished parts are kept then.

    Raises:
        LingError: unusable options, or a model that is not on this machine.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # read once, when tqdm is first imported
    tiny = model == TINY_LING
    # gsm8k takes its examples from a training split, which a file of test items has not.
    usual: TaskName = "tiny_ling" if tiny else "gsm8k_cot" if data and not fewshot_data else "gsm8k"
    what = Verification(
        model=model,
        serve=tuple(serve),
        device=detect_device(),
        reference=reference or "",
        task=task or usual,
        data=str(data or ""),
        fewshot_data=str(fewshot_data or ""),
        max_tokens=max_tokens or (_TINY_ANSWER if tiny else 4096),
        **more,
    )
    if serve and not serve[0].startswith("-"):
        raise LingError(f"verify: {serve[0]!r} is no option; serve flags follow after --")
    what.shape  # noqa: B018  (refuses a model that is no Ling before anything runs)
    console = Console(highlight=False)
    return interruptible(
        lambda: run(what, chosen(parts), out, restart=restart, console=console),
        "finished parts are kept, the same command goes on from there",
    )


def chosen(parts: str) -> list[str]:
    """Names of a comma-separated list, all if it is empty.

    Raises:
        LingError: an unknown part.
    """
    names = [name for name in parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        raise LingError(f"--parts: unknown part {unknown[0]} (known: {', '.join(PARTS)})")
    return names or list(PARTS)
