# SPDX-License-Identifier: Apache-2.0
"""Parts `logits` and `greedy` with engines whose answers are known: sound ones pass, each planted fault is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verify.checkpoints import changed
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.eval.studies.engines import EngineError, EngineRun, EngineSpec
from vllm_ling.eval.studies.parity import reference_logits
from vllm_ling.verify import greedy, logits, small_model
from vllm_ling.verify.settings import Verification

STOP = 2


def engine_run(spec: EngineSpec, **fields: Any) -> EngineRun:
    empty: dict[str, Any] = {"tokens": [], "tops": [], "logits": [], "accepted": 0, "drafts": 0, "status": {}}
    return EngineRun(spec.name, 0.0, **{**empty, **fields})


class Engines:
    """Stands in for `run_engines`: every engine computes what the reference makes of its checkpoint."""

    def __init__(self, changes: dict[str, Any] | None = None, errors: dict[str, str] | None = None) -> None:
        self.changes, self.errors = changes or {}, errors or {}
        self.asked: list[tuple[EngineSpec, bool]] = []

    def __call__(self, specs: list[EngineSpec], *, stock: bool = False, **_: Any) -> list[EngineRun]:
        (spec,) = specs
        self.asked.append((spec, stock))
        if spec.name in self.errors:
            if self.errors[spec.name] == "crash":
                raise EngineError("['plugin'] failed:\nTraceback\nKilled: out of memory")
            return [engine_run(spec, error=self.errors[spec.name])]
        found = reference_logits(Path(spec.model), spec.prompts)
        return [engine_run(spec, logits=self.changes.get(spec.name, lambda x: x)(found).tolist())]


def look(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, model: Path | str = "tiny-ling", **more: Any
) -> Any:
    monkeypatch.setattr(logits, "run_engines", engines)
    return logits.run(Verification(str(model), prompts=4, **more))


def test_sound_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    finding = look(
        engines, monkeypatch, serve=("--additional-config", '{"ling": {"inject_fault": "head_bytes"}}')
    )
    assert finding.outcome == "ok" and "4 word problems" in finding.evidence
    ((spec, stock),) = engines.asked
    assert (spec.dtype, stock, spec.options) == ("float32", False, {"lm_head": "bf16"})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 1.001,
        lambda x: x.roll(1, 0),
        lambda x: torch.where(torch.arange(x.shape[1]) == 9, torch.nan, x),
    ],
    ids=["scaled", "other prompt", "nan"],
)
def test_a_difference_of_the_logits_is_found(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    finding = look(Engines({"plugin": change}), monkeypatch)
    assert finding.outcome == "fail"
    assert "the plugin's logits are" in finding.evidence and "from the fp32 reference" in finding.evidence


def test_damaged_bytes_show_against_another_download_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "model.layers.5.mlp.shared_experts.up_proj.weight"

    def negative(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = (-tensors[name].float()).to(torch.float8_e4m3fn)

    folder = changed(tmp_path / "m", negative)
    assert look(Engines(), monkeypatch, folder).outcome == "ok", "the same wrong bytes on both sides"
    finding = look(Engines(), monkeypatch, folder, reference="tiny-ling")
    assert finding.outcome == "fail" and "the fp32 reference on --reference" in finding.evidence


def test_a_large_model_on_the_cpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model, "_MOST_BYTES", 10**6)
    finding = look(Engines(), monkeypatch)
    assert finding.outcome == "unknown" and "stock vLLM has no CPU layers for Ling" in finding.evidence
    finding = greedy.run(Verification("tiny-ling"))
    assert finding.outcome == "unknown" and "too many for the fp32 reference" in finding.evidence


@pytest.mark.parametrize(
    "error", ["Traceback\nvllm_ling.errors.LingError: lm_head.weight: drifts\nmore", "crash"]
)
def test_an_engine_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    finding = look(Engines(errors={"plugin": error}), monkeypatch)
    assert finding.outcome == "fail" and "the plugin's engine failed" in finding.evidence
    assert ("out of memory" if error == "crash" else "lm_head.weight: drifts") in finding.evidence


def test_stock_against_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines({"plugin": lambda x: x + 0.01 * torch.randn(x.shape)})
    serve = ("--moe-backend", "humming", "--additional-config", '{"ling": {"lm_head": "fp8"}}')
    finding = look(engines, monkeypatch, device="cuda", serve=serve)
    assert finding.outcome == "ok" and "against stock vLLM in BF16" in finding.evidence
    (first, stock), (second, plain) = engines.asked
    assert (stock, plain) == (True, False), "one after the other"
    assert (first.options, second.options) == ({}, {"lm_head": "fp8"})
    assert first.engine == second.engine and first.engine["moe_backend"] == "humming"
    assert first.engine["gpu_memory_utilization"] == 0.85


@pytest.mark.parametrize(
    ("change", "outcome", "said"),
    [
        (lambda x: x + 2.0 * x.std() * torch.randn(x.shape), "fail", "compute different models"),
        (lambda x: x * 0.8, "warn", "differ by more than rounding"),
        (lambda x: x * float("nan"), "fail", "compute different models"),
    ],
)
def test_stock_and_plugin_apart(
    monkeypatch: pytest.MonkeyPatch, change: Any, outcome: str, said: str
) -> None:
    torch.manual_seed(0)
    finding = look(Engines({"plugin": change}), monkeypatch, device="cuda")
    assert finding.outcome == outcome and said in finding.evidence, finding


def test_stock_that_fails_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = look(Engines(errors={"stock": "RuntimeError: no such layer"}), monkeypatch, device="cuda")
    assert finding.outcome == "unknown" and "no such layer" in finding.evidence


def pair(
    ours: list[int], theirs: list[int], gap: float | None = None, accepted: int = 9
) -> tuple[EngineRun, EngineRun]:
    """Plain and drafted runs of one prompt; at every place the drafted token is `gap` below the best logit of 20."""
    tops = [
        [(token, 20.0), *([(other, 20.0 * (1 - gap))] if gap is not None and other != token else [])]
        for token, other in zip(ours, theirs, strict=True)
    ]
    spec = EngineSpec("x", "", [])
    plain = engine_run(spec, tokens=[ours], tops=[tops])
    return plain, engine_run(spec, tokens=[theirs], accepted=accepted, drafts=5)


@pytest.mark.parametrize(
    ("runs", "exact", "outcome", "said"),
    [
        (pair([5, 6, STOP, 9], [5, 6, STOP, 8]), True, "ok", ""),
        (pair([5, 6, 7], [5, 8, 7]), True, "fail", "prompt 0 parts at token 1"),
        (pair([5, 6, 7], [5, 8, 7], gap=0.001), True, "fail", "1 prompts part in FP32"),
        (pair([5, 6, 7], [5, 8, 7], gap=0.001), False, "ok", ""),
        (pair([5, 6, 7], [5, 8, 7], gap=0.03), False, "warn", "close (0.03 of the logit) but no tie"),
        (pair([5, 6, 7], [5, 8, 7], gap=0.2), False, "fail", "with a gap of 0.2 of the logit"),
        (pair([5, 6, 7], [5, 8, 7]), False, "fail", "greedy output changes with speculation"),
        (pair([5, STOP, 7], [5, 8, STOP]), True, "fail", "parts at token 1"),
        (pair([5, 6, 7], [5, 6, 7], accepted=0), True, "warn", "accept length 1.00: hardly a draft"),
    ],
)
def test_greedy_pairs(runs: tuple[EngineRun, EngineRun], exact: bool, outcome: str, said: str) -> None:
    problems = greedy.judge(greedy.compare(*runs, frozenset({STOP})), exact)
    assert (problems[0][0] if problems else "ok") == outcome, problems
    assert said in "; ".join(text for _, text in problems)


def test_ties_are_counted() -> None:
    figures = greedy.compare(*pair([5, 6, 7], [5, 8, 7], gap=0.001), frozenset())
    assert (figures["ties"], figures["identical"], figures["away"]) == (1, 0, [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_divergence_of_two_engines(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    groups: list[list[EngineSpec]] = []

    def engines(specs: list[EngineSpec], **_: Any) -> list[EngineRun]:
        groups.append(specs)
        return [answers(spec) for spec in specs]

    def answers(spec: EngineSpec) -> EngineRun:
        tokens = [[5, 6, 7]] * len(spec.prompts)
        if spec.draft_tokens:
            tokens = [[5, 6, 8], *tokens[1:]]  # the injected divergence
        tops = [[[(token, 20.0)] for token in row] for row in tokens]
        return engine_run(spec, tokens=tokens, tops=tops, accepted=9, drafts=5)

    monkeypatch.setattr(greedy, "run_engines", engines)
    finding = greedy.run(Verification("tiny-ling", prompts=3, device=device))
    assert finding.outcome == "fail" and "speculation: prompt 0 parts at token 2" in finding.evidence
    assert "--speculative-config" in finding.fix and finding.figures["identical"] == 2
    dtype = "float32" if device == "cpu" else "bfloat16"
    asked = [(spec.draft_tokens, spec.dtype, spec.top_logits) for group in groups for spec in group]
    assert asked == [(0, dtype, 5), (3, dtype, 0)]
    assert [len(group) for group in groups] == ([2] if device == "cpu" else [1, 1]), (
        "one 70 GB model at a time"
    )


@pytest.mark.parametrize("name", ["without drafts", "with drafts"])
def test_an_engine_that_fails_fails_greedy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def engines(specs: list[EngineSpec], **_: Any) -> list[EngineRun]:
        return [engine_run(spec, error="ValueError: no room" if spec.name == name else "") for spec in specs]

    monkeypatch.setattr(greedy, "run_engines", engines)
    finding = greedy.run(Verification("tiny-ling", prompts=3))
    assert finding.outcome == "fail" and f"{name}: ValueError: no room" in finding.evidence


def test_a_model_without_mtp_is_unknown(tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(tiny_ling_path(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    finding = greedy.run(Verification(str(tmp_path / "m")))
    assert finding.outcome == "unknown" and "no MTP layer" in finding.evidence
