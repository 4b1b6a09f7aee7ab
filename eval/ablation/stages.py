# SPDX-License-Identifier: Apache-2.0
"""The stages of an ablation: which flags each adds, and how to tell that a server really runs it. Pure logic."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
        stock: the plugin is switched off.
        flags: serve flags beside the common ones.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    speculates: bool = False
    stock: bool = False
    flags: tuple[str, ...] = ()

    def serve_flags(self) -> list[str]:
        """Flags after the model's name."""
        words = []
        if not self.stock:
            words += ["--additional-config", json.dumps({"ling": self.options})]
        if self.speculates:
            drafts = {"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}
            words += ["--speculative-config", json.dumps(drafts)]
        return [*words, *self.flags]

    def env(self) -> dict[str, str]:
        """Variables of the server."""
        return {"VLLM_LING_DISABLE": "1"} if self.stock else {}


def plan(names: Sequence[str], extra: Mapping[str, str], gpu: bool) -> list[AblationStage]:
    """Stages in the order given, each with what those before it added ("stock" stands alone).

    Args:
        extra: flags by stage name, as typed; a name that is not known is a stage of its own that adds only its flags.

    Raises:
        LingError: unknown or repeated names, or flags that a shell would not split.
    """
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
            continue
        options |= _ADDS.get(name, ({}, {}))[0 if gpu else 1]
        speculates |= name == "mtp"
        # A stage with a --speculative-config of its own replaces ours.
        own = any(word.split("=")[0] == "--speculative-config" for word in flags)
        stages.append(AblationStage(name, dict(options), speculates and not own, flags=flags))
    return stages


def not_what_it_says(stage: AblationStage, served: Served) -> str | None:
    """Why the server is not running the stage, by its own record; None if nothing speaks against it."""
    if served.faults:
        return "; ".join(f"{code}: {message}" for code, message in served.faults.items())
    if stage.stock:
        return "the plugin is active although it was switched off" if served.plugin else None
    if not served.plugin:
        return "the plugin's series are not on /metrics: it did not load, so stock vLLM is serving"
    for shown in (_head_problem, _experts_problem, _linear_problem):
        if problem := shown(stage.options, served.choices):
            return problem
    if stage.speculates and "draft_head" not in served.proofs:
        return "MTP was asked for, but no proof of the draft head is on record"
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
