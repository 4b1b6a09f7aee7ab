# SPDX-License-Identifier: Apache-2.0
"""The checks by name, and the one place that runs them: missing evidence becomes *unknown* here, never *ok*."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ling.doctor.facts.store import Facts, MissingFact, Source
from vllm_ling.doctor.finding import Finding, Verdict, unknown
from vllm_ling.doctor.foreign import other_model
from vllm_ling.doctor.text import clean

NAME_A_LING_MODEL = "name a Ling-3.0 checkpoint (BailingMoeV3ForCausalLM), or a server or log of one"
CheckFunction = Callable[[Facts], Verdict]


@dataclass(frozen=True)
class Check:
    """A named check; `sources` are those of which any one can give it evidence, `about` is its `--explain` text."""

    name: str
    sources: frozenset[Source]
    about: str
    run: CheckFunction


_checks: dict[str, Check] = {}


def check(*sources: Source) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a function under its own name; its docstring is what `--explain` prints."""

    def register(function: CheckFunction) -> CheckFunction:
        name = function.__name__
        _checks[name] = Check(name, frozenset(sources), (function.__doc__ or "").strip(), function)
        return function

    return register


def all_checks() -> dict[str, Check]:
    """Every check by name, in the order in which they are shown."""
    import vllm_ling.doctor.checks  # noqa: F401  (registers them)

    return _checks


def run_checks(facts: Facts) -> tuple[list[Finding], list[str]]:
    """Findings of every check that a present source can serve, and the names of the others."""
    findings, idle = [], []
    foreign = other_model(facts)
    for entry in all_checks().values():
        if not entry.sources & facts.sources:
            idle.append(entry.name)
            continue
        if foreign is not None:
            findings.append(Finding(entry.name, "unknown", clean(foreign, 500), "", NAME_A_LING_MODEL))
        else:
            findings.append(judge(entry, facts))
    return findings, idle


def judge(entry: Check, facts: Facts) -> Finding:
    """One check's finding."""
    try:
        verdict = entry.run(facts)
    except MissingFact as missing:
        verdict = unknown(str(missing))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
        # Foreign data of an unexpected form must not take the other findings down.
        verdict = unknown(f"the evidence has an unexpected form ({type(error).__name__}: {error})")
    return Finding(
        entry.name, verdict.outcome, clean(verdict.evidence, 500), verdict.cost, clean(verdict.fix, 500)
    )
