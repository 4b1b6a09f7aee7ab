# SPDX-License-Identifier: Apache-2.0
"""Part `logits`: the first token's logits of the plugin against stock vLLM (GPU), or against the fp32 reference (CPU).

On the CPU both compute in FP32 on the same bytes, so they agree to the last digits. On a GPU the two also differ where
the plugin is meant to: the FP8 head, and SwiGLU clamps that stock vLLM applies before SiLU.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.finding import Outcome
from vllm_ling.eval.studies.engines import EngineError, EngineRun, EngineSpec, run_engines
from vllm_ling.eval.studies.parity import reference_logits, relative_rms
from vllm_ling.verify.finding import Finding, judged
from vllm_ling.verify.prompts import chat_prompts
from vllm_ling.verify.settings import Verification
from vllm_ling.verify.small_model import too_large

# As tests/cpu: FP32 sums in another order give 1e-6, a wrong scale 1e-2.
FP32_RMS = 2e-5
# Stock against plugin: chosen, not derived, since nobody had the real weights. BF16 noise alone stays below 0.01 nats;
# a broken layer gives whole nats. Between lies what an FP8 head and biting clamps may cost. Where the model is sure of
# its token, neither KL nor the best token sees even a large error, so the logits themselves are judged too.
_WARN_KL, _FAIL_KL = 0.05, 0.5
_WARN_TOP1, _FAIL_TOP1 = 0.9, 0.6
_WARN_RMS, _FAIL_RMS = 0.15, 0.5
_TIMEOUT_S = 3600.0
_REPORT = "report it with this page; VLLM_LING_DISABLE=1 serves with stock vLLM meanwhile"


def run(what: Verification) -> Finding:
    """Judges one prompt set; unknown where there is nothing to compare the plugin with."""
    prompts, kind = chat_prompts(what.folder, what.prompts, what.shape.vocab_size)
    options = {name: value for name, value in what.options.items() if name not in _DRAFT_ONLY}
    spec = EngineSpec(
        "plugin",
        str(what.folder),
        prompts,
        dtype="bfloat16" if what.device == "cuda" else "float32",
        first_logits=True,
        options=options,
        engine=what.engine(),
    )
    if what.device == "cuda":
        return _against_stock(spec, kind)
    return _against_reference(what, spec, kind)


_DRAFT_ONLY = ("inject_fault", "on_probe")


def _against_reference(what: Verification, spec: EngineSpec, kind: str) -> Finding:
    if reason := too_large(what.folder):
        return Finding(
            part="logits",
            outcome="unknown",
            evidence=f"nothing to compare with: stock vLLM has no CPU layers for Ling, and {reason}",
            fix="run this part on a GPU",
        )
    # The reference has the BF16 head; the FP8 head is the business of `head`.
    ours, problem = _engine(replace(spec, options={**spec.options, "lm_head": "bf16"}))
    if ours is None:
        return Finding(
            part="logits", outcome="fail", evidence=f"the plugin's engine failed: {problem}", fix=_REPORT
        )
    other = what.reference_folder
    same = other is not None and LingShape.from_folder(other).fmt == what.shape.fmt
    exact = reference_logits(other if other is not None and same else what.folder, spec.prompts)
    figures = compare(ours.logits, exact)
    problems: list[tuple[Outcome, str]] = []
    away = figures["rms"]
    beside = "the fp32 reference" + (" on --reference" if same else "")
    if not away <= FP32_RMS:
        problems.append(
            (
                "fail",
                f"the plugin's logits are {away:.3g} (relative RMS) from {beside}, at most {FP32_RMS:g} expected",
            )
        )
    said = [
        f"{len(spec.prompts)} {kind}, plugin in FP32 with the BF16 head against {beside}: {_text(figures)}"
    ]
    return judged("logits", problems, said, figures, _REPORT)


def _against_stock(spec: EngineSpec, kind: str) -> Finding:
    # "ling" is the plugin's quantization method; stock vLLM takes the checkpoint as it is.
    engine = {name: value for name, value in spec.engine.items() if value != "ling"}
    stock, problem = _engine(replace(spec, name="stock", options={}, engine=engine), stock=True)
    if stock is None:
        return Finding(
            part="logits",
            outcome="unknown",
            evidence=f"stock vLLM failed, so there is nothing to compare with: {problem}",
            fix="see whether stock vLLM serves the model: VLLM_LING_DISABLE=1 vllm-ling serve MODEL",
        )
    ours, problem = _engine(spec)
    if ours is None:
        return Finding(
            part="logits", outcome="fail", evidence=f"the plugin's engine failed: {problem}", fix=_REPORT
        )
    figures = compare(ours.logits, stock.logits)
    said = [f"{len(spec.prompts)} {kind}, plugin against stock vLLM in BF16: {_text(figures)}"]
    return judged("logits", judge_stock(figures), said, figures, _REPORT)


def judge_stock(figures: dict[str, float]) -> list[tuple[Outcome, str]]:
    """What speaks against the plugin computing the model that stock vLLM computes."""
    kl, top1, rms = figures["mean_kl"], figures["top1"], figures["rms"]
    if not (kl <= _FAIL_KL and top1 >= _FAIL_TOP1 and rms <= _FAIL_RMS):
        return [("fail", "plugin and stock vLLM compute different models")]
    if not (kl <= _WARN_KL and top1 >= _WARN_TOP1 and rms <= _WARN_RMS):
        return [
            ("warn", "plugin and stock vLLM differ by more than rounding; clamps that bite may explain it")
        ]
    return []


def compare(ours: Sequence[Sequence[float]], theirs: Any) -> dict[str, float]:
    """Relative RMS, share of equal best tokens and mean KL (theirs || ours) in nats of logits [prompts, vocab]."""
    a, b = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    return {
        "rms": relative_rms(a, b),
        "top1": float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        "mean_kl": float((log_b.exp() * (log_b - log_a)).sum(-1).mean()),
        "largest_difference": float((a - b).abs().max()),
    }


def last_line(error: str) -> str:
    """What a traceback or a log comes to: its last line that says something."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if "LingError" in line]
    return (named or lines or ["no message"])[-1]


def _engine(spec: EngineSpec, stock: bool = False) -> tuple[EngineRun | None, str]:
    """The run, or None and why there is none."""
    try:
        (run,) = run_engines([spec], stock=stock, keep_going=True, timeout_s=_TIMEOUT_S)
    except EngineError as error:
        return None, last_line(str(error))
    return (None, last_line(run.error)) if run.error else (run, "")


def _text(figures: dict[str, float]) -> str:
    return json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()})[1:-1].replace('"', "")
