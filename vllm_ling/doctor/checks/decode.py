# SPDX-License-Identifier: Apache-2.0
"""Whether decode steps run through the plugin's fused kernels, or stayed on vLLM's layers, and why."""

import json
import re
import shlex
from typing import Any

from vllm_ling.doctor.checks.experts import device, experts_format
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

# The byte model counts bytes, and these are the same on both paths; measured in eval/results/h200-decode.json.
_COST = "the same bytes in 6 times the launches per token: 2.4 times the fused path's GPU time, on an H200"
# What models/ling.py and spec_decode/mtp.py say on several GPUs; the latter also of a draft with several layers.
_ONE_GPU, _ONE_GPU_DRAFT = "it serves one GPU", "not one layer on one GPU"
_LIMIT = re.compile(r"up to (\d+) tokens")
# Kinds of batches that are meant for vLLM's layers (decode/policy.py).
_MEANT_FOR_LAYERS = re.compile(r"a prompt is read|more than \d+ tokens")
_LONG_SEQUENCE = re.compile(r"more than \d+ tokens of a sequence")
_MIXED = "plain decodes beside verified drafts"
_NOT_FOR_IT = "decode kernels are for NVIDIA GPUs; on this device every step runs through torch"


def _option(facts: Facts, name: str) -> str | None:
    """An option as the server resolved it or as it was typed, None if neither is known."""
    if (resolved := facts.get(f"serve.{name}_option")) is not None:
        return str(resolved)
    given = facts.get("serve.ling")
    return None if given is None else str(given.get(name, "default"))


def _models(facts: Facts) -> list[str]:
    """The models that decode here: the target, and the draft where MTP drafts."""
    drafts = facts["serve.k"] and "mtp" in str(facts.get("serve.method") or "mtp")
    return ["target", "draft"] if drafts else ["target"]


@check("log", "live")
def decode_path(facts: Facts) -> Verdict:
    """Decode steps of a few tokens run through the plugin's fused kernels, in the target and in the draft.

    ling.decode=auto does so only where experts and projections are read by the plugin's kernels (ling.moe, ling.linear)
    and the shapes fit; else vLLM's layers decode, with one line in the log and no error. Both paths read the same
    bytes, so no figure of the byte model shows it: what differs is the number of launches per token. Before its first
    graph the path is compared with vLLM's layers (PROOF ok: target_decode, draft_decode); without that proof nothing
    says that it computes the same.
    """
    if device(facts) != "cuda":
        return ok(_NOT_FOR_IT)
    choices, seen = facts["record.choices"], []
    if facts.get("plugin.state", "active") != "active":
        return unknown("the plugin is not active, so vLLM's layers decode", "see plugin_active")
    for model in ("target", "draft"):
        if model == "draft" and model not in _models(facts):
            continue
        if f"{model} decode" not in choices:
            return unknown(
                f"the plugin recorded no decision about how the {model} decodes",
                "send a request: it is made at the first decode step",
            )
        choice, reason = choices[f"{model} decode"]
        if choice != "fused":
            verdict = _on_layers(facts, model, str(reason))
            if verdict.outcome != "ok":
                return verdict
        elif (missing := _not_compared(facts, model)) is not None:
            return missing
        seen.append(f"{model} decode = {choice} ({reason})")
    return ok("; ".join(seen))


def _not_compared(facts: Facts, model: str) -> Verdict | None:
    """What is not known of a fused path, or None if all kinds of batches that were seen agreed with vLLM's layers."""
    checked, why = facts["record.choices"].get(f"{model} decode check", ("", ""))
    proven = f"{model}_decode" in facts["record.proofs"]
    if checked == "unknown":
        what = "is proven, but not for every batch" if proven else "was not compared with vLLM's layers"
        return unknown(
            f"the {model}'s fused path {what}: {why}",
            "where state slots are too few, a higher --gpu-memory-utilization gives the cache more",
        )
    if not proven:
        return unknown(
            f"the {model}'s fused path is taken, and no comparison of it with vLLM's layers is recorded",
            "serve with a vllm-ling that compares them at load, and read its whole log or --url",
        )
    return None


def _on_layers(facts: Facts, model: str, reason: str) -> Verdict:
    """A model that stayed on vLLM's layers: by what was asked, what the checkpoint is and what could be set."""
    said, asked = f"{model} decode = layers: {reason}", _option(facts, "decode")
    target = facts["record.choices"]["target decode"][1]
    one_gpu = target == _ONE_GPU and reason in (_ONE_GPU, _ONE_GPU_DRAFT)
    if asked == "fused" or facts.get("log.decode_refused"):
        fix = "serve on one GPU, or leave ling.decode=fused out" if one_gpu else _fix(facts, reason)
        return fail(f"ling.decode=fused was asked for and is not honoured: {said}", fix, _COST)
    if reason == "ling.decode=layers" or asked == "layers":
        return warn(f"{said}, by option", "leave ling.decode out", _COST)
    if one_gpu:
        return ok(said)
    stored = facts.get("checkpoint.format")
    experts = experts_format(facts) or ("mxfp4" if stored == "fp4" else stored)
    if experts is None:
        return unknown(
            f"{said}; whether an option mends it depends on the checkpoint's format, which is not known",
            "name the checkpoint too: vllm-ling doctor MODEL with --url or --log",
        )
    if experts != "mxfp4" and stored != "fp4":
        return ok(f"{said}; the fused path is for FP4 checkpoints, and these experts are {experts}")
    return warn(said, _fix(facts, reason), _COST)


def _fix(facts: Facts, reason: str) -> str:
    """The flags that the reason asks for, where they are not given already."""
    # linear's default takes our kernel wherever it can be built; moe's takes what measured fastest.
    enough = {"moe": ("ling",), "linear": ("ling", "auto", "default", None)}
    lacking = [
        name
        for name in ("moe", "linear")
        if f"ling.{name}=ling" in reason and _option(facts, name) not in enough[name]
    ]
    if not lacking:
        return (
            "no option mends this; the reason names what must fit, decode_kernels whether the kernels were built "
            "(vllm-ling tune builds them ahead)"
        )
    given: dict[str, Any] = facts.get("serve.ling") or {}
    options = {"moe": "ling", "linear": "ling"} | {
        name: value for name, value in given.items() if name not in ("moe", "linear")
    }
    text = json.dumps({"ling": options}, separators=(",", ":"))
    backends = (facts.get("serve.moe_backend"), facts.get("serve.moe_backend_nested"))
    other = next((name for name in backends if name not in (None, "auto", "humming")), None)
    more = f", and leave --moe-backend {other} out" if other else ""
    kept = "" if "serve.ling" in facts else " (with the ling options that are given already)"
    return f"--additional-config {shlex.quote(text)}{kept}{more}"


@check("log", "live")
def decode_batches(facts: Facts) -> Verdict:
    """With the fused path built, decode batches do take it.

    A batch goes through vLLM's layers if it reads a prompt or holds more tokens than the kernels take, as is meant, but
    also if one sequence alone verifies more tokens than that, or if plain decodes stand beside verified drafts. Each
    kind of batch is recorded when it is first seen, not how often; the replay of a captured graph records nothing.
    """
    if device(facts) != "cuda":
        return ok(_NOT_FOR_IT)
    choices, seen = facts["record.choices"], []
    for model in _models(facts):
        if f"{model} decode" not in choices:
            return unknown(
                f"the plugin recorded no decision about how the {model} decodes", "see decode_path"
            )
        if choices[f"{model} decode"][0] != "fused":
            continue
        limit = _LIMIT.search(str(choices[f"{model} decode"][1]))
        kinds = {
            what.removeprefix(f"{model} path: "): choice
            for what, (choice, _) in choices.items()
            if what.startswith(f"{model} path: ")
        }
        if limit is None or not kinds:
            return unknown(f"the {model}'s fused path was built, but no kind of batch is recorded")
        most = int(limit[1])
        found = _astray(
            model, most, int(facts["serve.k"]), [kind for kind in kinds if kinds[kind] != "fused"]
        )
        if found is not None:
            return found
        if "fused" not in kinds.values():
            return unknown(
                f"the {model}'s fused path was built, but no batch is recorded that took it", "send a request"
            )
        seen.append(f"{model}: up to {most} tokens")
    if not seen:
        return ok("no fused path was built, see decode_path")
    return ok(f"decode batches take the fused path ({', '.join(seen)}); larger ones go through vLLM's layers")


def _astray(model: str, most: int, k: int, on_layers: list[str]) -> Verdict | None:
    """What sends decode batches of `model` through vLLM's layers, if anything does."""
    shorter = f"num_speculative_tokens {most - 1}" if most > 1 else "leave --speculative-config out"
    if k + 1 > most:
        return warn(
            f"{model}: one sequence verifies {k + 1} tokens and the kernels take {most}: vLLM's layers run them",
            shorter,
            _COST,
        )
    for kind in on_layers:
        if _LONG_SEQUENCE.fullmatch(kind):
            return warn(f"{model}: decode batches go through vLLM's layers: {kind}", shorter, _COST)
        if kind == _MIXED:
            return warn(
                f"{model}: decode batches go through vLLM's layers: {kind} (seen at least once)",
                "--max-num-seqs 1, where one request at a time is enough; else nothing: other batches stay fused",
                _COST,
            )
        if not _MEANT_FOR_LAYERS.fullmatch(kind):
            return warn(
                f"{model}: decode batches go through vLLM's layers: {kind}",
                "mend what the reason names",
                _COST,
            )
    return None
