# SPDX-License-Identifier: Apache-2.0
"""The stages of an ablation: which flags each adds, and how to tell that a server really runs it. Pure logic."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.serving.served import Served

DRAFT_TOKENS = 3
# What each known stage adds to the `ling` section, on a GPU and on a CPU, where stock vLLM has no layers for Ling.
_ADDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "stock": ({}, {}),
    "baseline": (
        {"lm_head": "bf16", "moe": "stock", "linear": "stock"},
        {"lm_head": "bf16", "moe": "reference"},
    ),
    "moe": ({"moe": "ling", "linear": "ling"}, {"moe": "ling"}),
    "head": ({"lm_head": "fp8"}, {"lm_head": "fp8"}),
    "mtp": ({}, {}),
}
KNOWN = tuple(_ADDS)


@dataclass(frozen=True)
class AblationStage:
    """One server configuration.

    Attributes:
        options: the `ling` section, this stage's and those before it.
        speculates: whether drafts must be seen.
        accept_length: tokens a round that vLLM accepts by lot, for weights whose drafts say nothing; None verifies.
        stock: the plugin is switched off.
        flags: serve flags beside the common ones.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    speculates: bool = False
    accept_length: float | None = None
    stock: bool = False
    flags: tuple[str, ...] = ()

    def serve_flags(self) -> list[str]:
        """Flags after the model's name."""
        words = []
        if not self.stock:
            words += ["--additional-config", json.dumps({"ling": self.options})]
        if self.speculates:
            drafts: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}
            if self.accept_length is not None:
                drafts["rejection_sample_method"] = "synthetic"
                drafts["synthetic_acceptance_length"] = self.accept_length
            words += ["--speculative-config", json.dumps(drafts)]
        return [*words, *self.flags]

    def env(self) -> dict[str, str]:
        """Variables of the server."""
        return {"VLLM_LING_DISABLE": "1"} if self.stock else {}


def plan(
    names: Sequence[str], extra: Mapping[str, str], gpu: bool, accept_length: float | None = None
) -> list[AblationStage]:
    """Stages in the order given, each with what those before it added.

    "stock" stands alone, but what follows it starts from the baseline's options: the plugin with stock's own ways.

    Args:
        extra: flags by stage name, as typed; a name that is not known is a stage of its own that adds only its flags.
        accept_length: see `AblationStage`, for the stages that speculate.

    Raises:
        LingError: unknown or repeated names, an impossible accept length, or flags that a shell would not split.
    """
    if accept_length is not None and not 1 <= accept_length <= DRAFT_TOKENS + 1:
        most = DRAFT_TOKENS + 1
        raise LingError(
            f"--accept-length {accept_length:g}: with {DRAFT_TOKENS} draft tokens it lies between 1 and {most}"
        )
    if not names:
        raise LingError(f"--stages: name at least one of {', '.join(KNOWN)}")
    if odd := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
        raise LingError(f"--stages: {odd[0]!r} names a folder: letters, digits, and - . _ within")
    if repeated := {name for name in names if names.count(name) > 1}:
        raise LingError(f"--stages: {', '.join(sorted(repeated))} is there twice")
    if unused := [name for name in extra if name not in names]:
        raise LingError(f"--flags {unused[0]}=...: no such stage in --stages {','.join(names)}")
    options: dict[str, str] = {}
    speculates, stages = False, []
    for name in names:
        if name not in _ADDS and name not in extra:
            raise LingError(
                f"--stages: unknown stage {name} (known: {', '.join(KNOWN)}; others need --flags '{name}=...')"
            )
        try:
            flags = tuple(shlex.split(extra.get(name, "")))
        except ValueError as error:
            raise LingError(f"--flags {name}: {error}") from None
        if name == "stock":
            stages.append(AblationStage(name, stock=True, flags=flags))
            options = _added("baseline", gpu) | options
            continue
        options |= _added(name, gpu)
        speculates |= name == "mtp"
        # A stage with a --speculative-config of its own replaces ours.
        own = any(word.split("=")[0] == "--speculative-config" for word in flags)
        drafts = speculates and not own
        stages.append(
            AblationStage(name, dict(options), drafts, accept_length if drafts else None, flags=flags)
        )
    return stages


def _added(name: str, gpu: bool) -> dict[str, str]:
    return _ADDS.get(name, ({}, {}))[0 if gpu else 1]


def not_what_it_says(stage: AblationStage, served: Served) -> str | None:
    """Why the server is not running the stage, by its own record; None if nothing speaks against it."""
    if served.faults:
        return "; ".join(f"{code}: {message}" for code, message in served.faults.items())
    if stage.stock:
        return "the plugin is active although it was switched off" if served.plugin else None
    if not served.plugin:
        return "by /metrics the plugin is not active (not loaded, or switched off), so stock vLLM is serving"
    for shown in (_head_problem, _experts_problem, _linear_problem):
        if problem := shown(stage.options, served.choices):
            return problem
    if stage.speculates and "draft_head" not in served.proofs:
        return "MTP was asked for, but no proof of the draft head is on record"
    return None


def not_its_drafts(stage: AblationStage, accept_length: float | None, rounds: int) -> str | None:
    """Why what was counted is not the stage's drafting; None if it is, or if the stage has drafts of its own.

    Args:
        accept_length: tokens a round that were counted, None if nothing was drafted.
        rounds: over which.
    """
    if any(word.startswith("--speculative-config") for word in stage.flags):
        return None
    if (accept_length is not None) != stage.speculates:
        seen = "no draft was counted" if stage.speculates else "drafts were counted"
        return f"{seen}, which is not what this stage is about"
    if stage.accept_length is None or accept_length is None:
        return None
    # Five times the deviation of a mean of `rounds` lengths, each of which lies between 1 and DRAFT_TOKENS + 1.
    noise = 5 * (DRAFT_TOKENS / 2) / math.sqrt(max(1, rounds))
    if abs(accept_length - stage.accept_length) > noise:
        return f"accept length {accept_length:.2f} was counted, and {stage.accept_length:g} was asked for"
    return None


def _head_problem(options: Mapping[str, str], choices: Mapping[str, str]) -> str | None:
    wanted, found = options.get("lm_head"), choices.get("lm_head", "not on record")
    if wanted in ("bf16", "fp8") and not found.startswith(wanted):
        return f"ling.lm_head={wanted} was asked for, but lm_head = {found}"
    return None


def _experts_problem(options: Mapping[str, str], choices: Mapping[str, str]) -> str | None:
    """Our experts show as the decode kernel on a GPU, and as plain torch on a CPU."""
    wanted = options.get("moe", "auto")
    experts = {name: choice for name, choice in choices.items() if name.startswith("moe ")}
    shown = {"ling": ("ling", "torch"), "reference": ("reference",)}.get(wanted)
    if shown is None:
        return None
    decode = experts.get("moe decode")
    if decode in shown or (decode is None and any(choice in shown for choice in experts.values())):
        return None
    said = ", ".join(f"{name} = {choice}" for name, choice in experts.items()) or "nothing of the experts"
    return f"ling.moe={wanted} was asked for, but the record says {said}"


def _linear_problem(options: Mapping[str, str], choices: Mapping[str, str]) -> str | None:
    found = [choice for name, choice in choices.items() if name.startswith("linear ")]
    if options.get("linear") == "ling" and "ling" not in found:
        return "ling.linear=ling was asked for, but no projection runs on it"
    return None
