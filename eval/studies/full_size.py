# SPDX-License-Identifier: Apache-2.0
"""Is our engine right at full size? Hidden states and logits against stock vLLM and an fp32 reference, same weights.

Run as `python -m vllm_ling.eval.studies.full_size --layers 12 --out FILE` on a GPU.

Three engines, each in a process of its own: ours, ours with MTP drafts, stock. All tokens are known
in advance (see `seeded_weights`), so states are compared token by token: prompts, decoding of 1 to 8 sequences,
sequences that come and go, verification of drafts, and state slots that aborted requests left behind.
`full_size_bars` says what is allowed and why.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_ling.bench.processes import end_all
from vllm_ling.errors import LingError
from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.studies.child import run_child
from vllm_ling.eval.studies.exact import exact_states
from vllm_ling.eval.studies.full_size_bars import (
    TOP1_SLACK,
    States,
    agreement,
    compare,
    depth_of,
    identical,
    missing,
    repeats,
)
from vllm_ling.eval.studies.full_size_side import PREFILL, SideSpec
from vllm_ling.eval.studies.seeded_engine import our_options, seeded_folder
from vllm_ling.eval.studies.seeded_weights import SeededWeights
from vllm_ling.eval.studies.workloads import LENGTHS, OWN, REPEATS, stale_texts, texts

SIDE = "vllm_ling.eval.studies.full_size_side"
# Our path may take other routes for prefill and for more tokens than its kernels hold.
FUSED_WORKLOADS = ("decode 1", "decode 2", "decode 3", "decode 4", "decode 8", "verify 1", "verify 2")


def sides(options: dict[str, Any], model: str, layers: int, every: int, stock: bool) -> dict[str, SideSpec]:
    """The engines by name."""
    taps = tuple(range(every - 1, layers, every))
    found = {
        "ours": SideSpec(options, model, layers, taps),
        "drafted": SideSpec(options, model, layers, taps, draft_tokens=3),
    }
    # Last: if time runs out, ours have been compared with the reference.
    return found | ({"stock": SideSpec(None, model, layers, taps)} if stock else {})


def reference(spec: SideSpec, say: Callable[[str], None]) -> tuple[States, States]:
    """States of the fp32 model on all texts, and on those with another prompt."""
    with tempfile.TemporaryDirectory() as name:
        folder = seeded_folder(Path(name), spec.model, spec.layers)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = SeededWeights(config, "cuda" if torch.cuda.is_available() else "cpu")
    right, other = texts(config["vocab_size"]), stale_texts(config["vocab_size"])
    asked = [(lane, text) for group in (right, other) for lane, text in group.items()]
    begins = [LENGTHS[lane] for lane, _ in asked]
    found = exact_states(config, weights, [text for _, text in asked], spec.taps, begins, say)
    for (lane, text), kept in zip(asked, found, strict=True):
        kept["positions"] = torch.arange(len(text))
        kept["logits positions"] = torch.arange(LENGTHS[lane], len(text))
    exact = dict(zip(right, found, strict=False))
    return exact, dict(zip(other, found[len(right) :], strict=True))


def judge(
    spec: SideSpec, runs: dict[str, dict[str, Any]], exact: States, stale: States, vocabulary: int
) -> dict[str, Any]:
    """Every comparison of our engines, and what is wrong."""
    known = texts(vocabulary)
    answers = {lane: range(LENGTHS[lane], len(text)) for lane, text in known.items()}
    prompts = {lane: range(LENGTHS[lane]) for lane in known}
    rows, wrong = [], []
    stock = runs["stock"]["states"] if "stock" in runs else {}
    strict = (spec.options or {}).get("linear") == "ling" or not torch.cuda.is_available()
    mine = [name for name in ("ours", "drafted") if name in runs]
    for name in mine:
        for workload, states in runs[name]["states"].items():
            spans = {workload: answers} | ({"prefill": prompts} if workload == PREFILL else {})
            theirs = stock.get(workload, stock.get(PREFILL))
            if theirs is not None:
                theirs = {lane: kept for lane, kept in theirs.items() if lane in states}
            others = {lane: kept for lane, kept in stale.items() if lane in states}
            for title, span in spans.items():
                wrong += missing(title, span, states)
                for tap in [*map(str, spec.taps), "final", "logits"]:
                    control = others if span is answers else None
                    depth, own = depth_of(tap, spec.layers), strict and workload in OWN
                    row = compare(title, tap, span, states, theirs, exact, control, depth, own)
                    if row is not None:
                        rows.append(row.as_dict())
            if not runs[name]["tokens"][workload]:
                wrong.append(f"{workload}: greedy tokens differ from the known continuation")
            fused = workload not in FUSED_WORKLOADS or (spec.options or {}).get("decode") != "fused"
            if not fused and not runs[name]["fused"][workload]:
                wrong.append(f"{workload}: ling.decode=fused never took a step")
    wrong += [line for row in rows for line in row["wrong"]]
    top1 = {
        name: agreement(runs[name]["states"][workload], exact, answers, known)
        for name, workload in (("stock", "decode 8"), ("ours", "decode 8"), ("drafted", "verify 4"))
        if name in runs
    }
    wrong += [
        f"top-1 agreement with fp32 is {share:.1%}, stock's {top1['stock']:.1%}"
        for share in top1.values()
        if "stock" in top1 and not share >= top1["stock"] - TOP1_SLACK
    ]
    seen = {title: states for name in mine for title, states in runs[name]["states"].items()}
    slots = {}
    for first, reused, again in REPEATS:
        if first in seen:
            shares = [identical(seen[first], seen[other]) for other in (reused, again)]
            slots[reused] = {"same_bits": shares[0], "same_bits_without_aborts": shares[1]}
            wrong += repeats(reused, *shares)
    for name in mine:
        wrong += [f"{name}: fault {code}: {text}" for code, text in runs[name]["status"]["faults"].items()]
        if name == "drafted" and not 0 < runs[name]["accepted"] < 3 * runs[name]["drafts"]:
            wrong.append("drafts must be accepted and rejected, or verification has shown nothing")
    return {"rows": rows, "top1": top1, "slots": slots, "wrong": wrong}


def main() -> int:
    """Runs the comparison, writes JSON, returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", choices=("flash", "mini"), default="flash")
    parser.add_argument("--options", type=json.loads, default=None, help="the ling section (JSON)")
    parser.add_argument(
        "--every", type=int, default=6, help="tap the residual stream after every this many layers"
    )
    parser.add_argument("--without-stock", action="store_true", help="where stock vLLM cannot run")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one engine")
    parser.add_argument(
        "--at-once", type=int, default=1, help="engines at a time; each holds its own weights"
    )
    args = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    options = our_options() if args.options is None else args.options
    specs = sides(options, args.model, args.layers, args.every, not args.without_stock)
    runs: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:

        def run(name: str) -> None:
            say(f"{name}: starting")
            spec, file = specs[name], Path(folder, f"{name}.pt")
            try:
                run_child(SIDE, asdict(spec), file, stock=spec.options is None, timeout_s=args.timeout)
            except LingError as error:  # the others are worth having
                say(f"{name}: {error}")
                failed.append(f"{name}: {str(error).strip().splitlines()[-1]}")
                return
            runs[name] = torch.load(file)
            say(f"{name}: engine up after {runs[name]['start_s']} s, done after {runs[name]['seconds']} s")

        try:
            list(pool.map(run, specs))
        except BaseException:
            end_all()
            raise
    exact, stale = reference(specs["ours"], say)
    vocabulary = exact[0]["logits"].shape[-1]
    found = judge(specs["ours"], runs, exact, stale, vocabulary)
    found["wrong"] = failed + found["wrong"]
    kept = ("tokens", "fused", "start_s", "seconds", "drafts", "accepted", "status")
    result = {
        "provenance": provenance(),
        "engines": {
            name: asdict(specs[name]) | {key: run[key] for key in kept} for name, run in runs.items()
        },
        **found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in found["rows"]:
        print(table_line(row))
    print(f"slots: {found['slots']}\ntop-1 besides the known token: {found['top1']}")
    for line in found["wrong"]:
        print(f"WRONG: {line}")
    say(f"{'failed' if found['wrong'] else 'passed'}; written: {args.out}")
    return int(bool(found["wrong"]))


def table_line(row: dict[str, Any]) -> str:
    """One comparison for the screen."""

    def figure(name: str, key: str = "rms") -> str:
        value = row[name][key] if isinstance(row[name], dict) else row[name]
        return "     -" if value is None else f"{value:6.4f}"

    return (
        f"{row['workload']:22} {row['tap']:>7} {row['tokens']:5} tokens  ours {figure('ours')} (median "
        f"{figure('ours', 'median')})  stock {figure('stock')}  bar {figure('limits')}  apart {figure('apart')}  "
        f"stale {figure('stale')}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
