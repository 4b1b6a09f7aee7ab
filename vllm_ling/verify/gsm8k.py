# SPDX-License-Identifier: Apache-2.0
"""Part `gsm8k`: some items of GSM8K through lm-eval against the server that the flags describe."""

from math import comb
from pathlib import Path

from vllm_ling.doctor.finding import Outcome
from vllm_ling.errors import LingError
from vllm_ling.eval.report.result_file import ResultFile
from vllm_ling.eval.runs.gsm8k import Gsm8k, evaluate, quiet
from vllm_ling.eval.runs.lm_tasks import load_task
from vllm_ling.eval.serving.served import Served
from vllm_ling.verify.finding import Finding, judged
from vllm_ling.verify.settings import Verification

_FAIL_P, _WARN_P = 0.01, 0.1
_ODD_SHARE = 0.1
_FIX = "see the part `logits`, and vllm-ling doctor with the same flags; gsm8k.answers.jsonl has the answers"
_MEND = "give --data FILE (GSM8K's test.jsonl), or load the data set once with a network; pip install 'vllm-ling[eval]'"


def missing_data(what: Verification) -> Finding | None:
    """Whether the questions cannot be had, before a server is started for them."""
    try:
        with quiet():
            load_task(what.task, _path(what.data), _path(what.fewshot_data), None)
    except LingError as error:
        return Finding(part="gsm8k", outcome="unknown", evidence=f"no questions: {error}", fix=_MEND)
    return None


def run(what: Verification, served: Served, folder: Path, restart: bool) -> Finding:
    """Asks what an interrupted run has not asked yet, and judges the answers.

    Raises:
        LingError: the server stopped answering; what it answered is kept in `folder`.
    """
    questions = Gsm8k(
        task=what.task,
        data=_path(what.data),
        fewshot_data=_path(what.fewshot_data),
        limit=what.items,
        max_tokens=what.max_tokens,
    )
    result = evaluate(questions, served, folder / "gsm8k.json", label="verify", restart=restart)
    return judge(result, what.expect_accuracy, server_problems(served))


def judge(result: ResultFile, expected: float, problems: list[tuple[Outcome, str]]) -> Finding:
    """Fails if so few right answers are next to impossible for a server whose true share is `expected`."""
    s = result.summary
    answered = [item for item in result.items if item.correct is not None]
    right = sum(bool(item.correct) for item in answered)
    figures = {**s.model_dump(), "right": right, "answered": len(answered), "expected_accuracy": expected}
    if not answered:
        first = next((item.error for item in result.items if item.error), "no item")
        return judged("gsm8k", [*problems, ("fail", f"no request was answered: {first}")], [], figures, _FIX)
    p = chance_of_so_few(right, len(answered), expected)
    figures["p"] = p
    found = list(problems)
    score = f"{right} of {len(answered)} right"
    if p < _WARN_P:
        found.append(
            (
                "fail" if p < _FAIL_P else "warn",
                f"{score}: a server that is right {expected:.0%} of the time gets so few with probability {p:.2g}",
            )
        )
    if s.transport_errors:
        first = next(item.error for item in result.items if item.error)
        kind: Outcome = "fail" if s.transport_errors > len(answered) else "warn"
        found.append(
            (kind, f"{s.transport_errors} requests failed and are not judged, the first with {first}")
        )
    for count, what in ((s.truncated, "cut at --max-tokens"), (s.invalid, "without a number")):
        if count > _ODD_SHARE * len(answered):
            found.append(("warn", f"{count} of {len(answered)} answers {what}"))
    said = [score, f"{s.invalid} without a number", f"{s.truncated} cut at the limit"]
    if s.accept_length is not None:
        said.append(f"accept length {s.accept_length:.2f}")
    return judged("gsm8k", found, said, figures, _FIX)


def chance_of_so_few(right: int, items: int, share: float) -> float:
    """Probability of at most `right` right answers of `items` if each is right with probability `share`."""
    return sum(comb(items, n) * share**n * (1 - share) ** (items - n) for n in range(right + 1))


def server_problems(served: Served) -> list[tuple[Outcome, str]]:
    """What the server itself says is wrong with it."""
    found: list[tuple[Outcome, str]] = [
        ("fail", f"FAULT {code}: {message}") for code, message in served.faults.items()
    ]
    if not served.plugin:
        found.append(("fail", "by /metrics the plugin is not active: stock vLLM answered"))
    return found


def _path(text: str) -> Path | None:
    return Path(text) if text else None
