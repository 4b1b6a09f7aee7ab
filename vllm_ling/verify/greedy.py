# SPDX-License-Identifier: Apache-2.0
"""Part `greedy`: speculation must not change greedy output.

FP32 outputs are identical. In BF16 a batch of verified tokens rounds differently from one token at a time, so outputs
may part at a tie: two logits closer than the rounding step of a BF16 logit of their size.
"""

from collections.abc import Sequence
from typing import Any

from vllm_ling.doctor.finding import Outcome
from vllm_ling.eval.studies.engines import EngineError, EngineRun, EngineSpec, run_engines
from vllm_ling.verify.finding import Finding, judged
from vllm_ling.verify.logits import last_line
from vllm_ling.verify.prompts import chat_prompts, stop_tokens
from vllm_ling.verify.settings import Verification
from vllm_ling.verify.small_model import too_large

# BF16 keeps 8 significant bits: neighbours differ by 2^-7 of their size, and either logit may round either way.
TIE = 2.0**-6
# A routing decision that falls the other way moves logits by more than one rounding; beyond this nothing explains it.
CLOSE = 2.0**-4
_USELESS = 1.1
_TOP = 5
_TIMEOUT_S = 7200.0
_FIX = "start without --speculative-config, and report it with this page"


def run(what: Verification) -> Finding:
    """Two engines one after the other; unknown without an MTP layer, or for a model too large for the CPU."""
    if not what.drafts:
        return Finding(
            part="greedy",
            outcome="unknown",
            evidence="the checkpoint has no MTP layer, so nothing is drafted",
        )
    if what.device == "cpu" and (reason := too_large(what.folder)):
        return Finding(part="greedy", outcome="unknown", evidence=reason, fix="run this part on a GPU")
    prompts, kind = chat_prompts(what.folder, what.prompts, what.shape.vocab_size)
    exact = what.device == "cpu"
    runs, problem = _engines(what, prompts, exact)
    if runs is None:
        return Finding(part="greedy", outcome="fail", evidence=f"the engine failed: {problem}", fix=_FIX)
    figures = compare(*runs, stop_tokens(what.folder))
    precision = "FP32" if exact else "BF16"
    said = (
        f"{figures['prompts']} {kind}, {figures['tokens']} tokens in {precision}, {what.drafts} draft tokens against "
        f"none: {figures['identical']} identical, {figures['ties']} part at a tie; accept length "
        f"{_number(figures['accept_length'])}"
    )
    return judged("greedy", judge(figures, exact), [said], figures, _FIX)


def compare(plain: EngineRun, drafted: EngineRun, stops: frozenset[int]) -> dict[str, Any]:
    """How the answers of two runs part, each up to its first stop token; `away` holds those that part without a tie."""
    counts: dict[str, Any] = {"prompts": len(plain.tokens), "tokens": 0, "identical": 0, "ties": 0}
    away: list[dict[str, Any]] = []
    for number, (ours, theirs) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)):
        one, other = answer(ours, stops), answer(theirs, stops)
        counts["tokens"] += len(one)
        first = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if first is None and len(one) == len(other):
            counts["identical"] += 1
            continue
        place = min(len(one), len(other)) if first is None else first
        gap = _gap(plain.tops[number][place], other[place]) if plain.tops and place < len(other) else None
        if gap is not None and gap <= TIE:
            counts["ties"] += 1
        else:
            away.append({"prompt": number, "token": place, "gap": gap})
    return {**counts, "away": away, "accept_length": drafted.accept_length}


def judge(figures: dict[str, Any], exact: bool) -> list[tuple[Outcome, str]]:
    """What is wrong.

    Args:
        exact: FP32: not even a tie may part the outputs.
    """
    problems: list[tuple[Outcome, str]] = []
    for case in figures["away"]:
        where = f"prompt {case['prompt']} parts at token {case['token']}"
        gap = case["gap"]
        if exact or gap is None or gap > CLOSE:
            size = "" if gap is None else f" with a gap of {gap:.3g} of the logit"
            problems.append(("fail", f"greedy output changes with speculation: {where}{size}"))
        else:
            problems.append(("warn", f"{where}, close ({gap:.3g} of the logit) but no tie"))
    if exact and figures["ties"]:
        problems.append(
            ("fail", f"greedy output changes with speculation: {figures['ties']} prompts part in FP32")
        )
    accept = figures["accept_length"]
    if accept is None:
        problems.append(("fail", "no draft was counted"))
    elif accept < _USELESS:
        problems.append(
            (
                "warn",
                f"accept length {accept:.2f}: hardly a draft was accepted, so little was put to the test",
            )
        )
    return problems


def answer(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return list(tokens[: end + 1])


def _gap(tops: Sequence[Sequence[Any]], token: int) -> float | None:
    """How far `token` is below the best logit, as a share of it; None if it is not among the best."""
    logits = {int(entry[0]): float(entry[1]) for entry in tops}
    best = max(logits.values())
    return (best - logits[token]) / max(abs(best), 1e-9) if token in logits else None


def _engines(
    what: Verification, prompts: list[list[int]], exact: bool
) -> tuple[tuple[EngineRun, EngineRun] | None, str]:
    """Runs without and with drafts.

    On a GPU in a process each, so that the first model is gone before the second is read; on a CPU models are small,
    and one process saves the time of an import.
    """
    specs = [_spec(what, prompts, exact, drafts) for drafts in (0, what.drafts)]
    groups = [specs] if what.device == "cpu" else [[spec] for spec in specs]
    runs: list[EngineRun] = []
    for group in groups:
        try:
            runs += run_engines(group, keep_going=True, timeout_s=_TIMEOUT_S)
        except EngineError as error:
            return None, last_line(str(error))
        if failed := next((run for run in runs if run.error), None):
            return None, f"{failed.name}: {last_line(failed.error)}"
    return (runs[0], runs[1]), ""


def _spec(what: Verification, prompts: list[list[int]], exact: bool, drafts: int) -> EngineSpec:
    options = what.options if drafts else {k: v for k, v in what.options.items() if k != "inject_fault"}
    return EngineSpec(
        "with drafts" if drafts else "without drafts",
        str(what.folder),
        prompts,
        dtype="float32" if exact else "bfloat16",
        max_tokens=what.tokens,
        top_logits=0 if drafts else _TOP,
        draft_tokens=drafts,
        options=options,
        engine=what.engine(),
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
