# SPDX-License-Identifier: Apache-2.0
"""Does our engine hold out? Many thousand tokens with aborts and shared prompts, watched for leaks, NaN and drift.

Run as `python -m vllm_ling.eval.studies.long_run --tokens 200000 --out FILE`; it ends when the tokens are done or the
budget is spent, and says which.

The weights know every answer (see `seeded_weights`), so each emitted token is checked. GPU memory is compared between
the first twentieth of the tokens, when all kernels have run, and the end.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.studies.seeded_engine import Requests, our_options, seeded_folder, start
from vllm_ling.eval.studies.traffic import (
    MIB,
    Answer,
    Ask,
    Budget,
    Check,
    Traffic,
    memory_checks,
    probe_check,
    wrong_tokens,
)
from vllm_ling.eval.studies.workloads import LENGTHS, texts

_PROBES = (0, 2, 3)  # lanes
_WAITING = 3  # requests that queue for a slot
_RESERVE = 15.0  # seconds for the last requests, the probe and the file
_WARM = 0.05


@dataclass
class Counts:
    """What happened so far."""

    tokens: int = 0
    finished: int = 0
    aborted: int = 0
    shared: int = 0
    wrong: int = 0
    watched: int = 0
    not_finite: int = 0
    seconds: float = 0.0
    timeline: list[dict[str, float]] = field(default_factory=list)


class Run:
    """One engine under traffic.

    Args:
        slots: sequences that the engine decodes together.
    """

    def __init__(self, llm: Any, vocabulary: int, prefix: int, slots: int, seed: int) -> None:
        self.requests, self.counts = Requests(llm), Counts()
        self._llm, self._vocabulary, self._slots = llm, vocabulary, slots
        self._traffic = Traffic(vocabulary, prefix, seed)
        self._asks: dict[str, Ask] = {}
        self._number = 0
        self._emitted = 0  # by requests that are over

    def probe(self) -> list[Answer]:
        """Answers to fixed prompts, each alone and without cached blocks."""
        lane_texts, answers = texts(self._vocabulary), []
        for lane in _PROBES:
            self._llm.reset_prefix_cache()
            name = self._name("probe")
            self.requests.add(name, lane_texts[lane][: LENGTHS[lane]], 16, logprobs=5)
            self.requests.finish()
            answers.append(self.requests.forget(name))
        return answers

    def work(self, target: int, budget: Budget, say: Callable[[str], None]) -> None:
        """Traffic until `target` tokens are emitted or the budget is spent; running requests are then finished."""
        began = said = time.monotonic()
        while self.counts.tokens < target and not budget.spent():
            while len(self.requests.running) < self._slots + _WAITING:
                self._ask()
            self._step()
            now = time.monotonic()
            if now - said >= 5:
                said = now
                entry = {"seconds": round(self.counts.seconds + now - began, 1), "tokens": self.counts.tokens}
                self.counts.timeline.append(
                    entry | {k: v / MIB for k, v in gpu_memory().items() if v is not None}
                )
                say(
                    f"{self.counts.tokens} of {target} tokens, {self.counts.tokens / entry['seconds']:.0f} a second, "
                    f"{self.counts.finished} finished, {self.counts.aborted} aborted, {self.counts.wrong} wrong"
                )
        while self.requests.running:
            self._step()
        self.counts.seconds += time.monotonic() - began

    def _ask(self) -> None:
        ask, name = self._traffic.next(), self._name("ask")
        self._asks[name] = ask
        self.counts.shared += ask.shares
        self.requests.add(name, ask.prompt, ask.max_tokens, logprobs=2 if ask.watched else None)

    def _step(self) -> None:
        for name in self.requests.step():
            self.counts.finished += 1
            self._over(name)
        for name in list(self.requests.running):
            after = self._asks[name].abort_after
            if after is not None and len(self.requests.tokens[name]) >= after:
                self.requests.abort(name)
                self.counts.aborted += 1
                self._over(name)
        running = sum(len(self.requests.tokens[name]) for name in self.requests.running)
        self.counts.tokens = self._emitted + running

    def _over(self, name: str) -> None:
        ask = self._asks.pop(name)
        tokens, logprobs = self.requests.forget(name)
        self._emitted += len(tokens)
        self.counts.wrong += wrong_tokens(ask.prompt, tokens, self._vocabulary)
        values = [value for position in logprobs for value in position.values()]
        self.counts.watched += len(values)
        self.counts.not_finite += sum(not math.isfinite(value) for value in values)

    def _name(self, kind: str) -> str:
        self._number += 1
        return f"{kind} {self._number}"


def gpu_memory() -> dict[str, int | None]:
    """Bytes in use: by tensors, by torch's allocator, and on the whole GPU as the driver counts it."""
    import torch

    if not torch.cuda.is_available():
        return {"allocated": None, "reserved": None, "driver": None}
    torch.cuda.synchronize()
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    used = done.stdout.strip()
    driver = int(used) * MIB if done.returncode == 0 and used.isdigit() else None
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "driver": driver,
    }


def checks(
    counts: Counts, hits: int | None, memory: list[Check], probe: Check, faults: dict[str, str]
) -> list[Check]:
    """Everything that must hold; `hits` is None without prefix caching."""
    return [
        *memory,
        probe,
        Check("every token right", counts.wrong == 0, f"{counts.wrong} of {counts.tokens} tokens are wrong"),
        Check(
            "log-probabilities finite",
            counts.watched > 0 and counts.not_finite == 0,
            f"{counts.not_finite} of {counts.watched} are not",
        ),
        Check(
            "requests aborted", counts.aborted > 0, f"{counts.aborted} aborted, {counts.finished} finished"
        ),
        Check(
            "prefix cache hit",
            None if hits is None else hits > 0,
            f"{hits} tokens from the cache, {counts.shared} requests with a shared beginning",
        ),
        Check(
            "no fault", not faults, "; ".join(f"{code}: {text}" for code, text in faults.items()) or "none"
        ),
    ]


def engine_settings(draft: int, slots: int, context: int, caching: bool, eager: bool) -> dict[str, Any]:
    """Engine arguments: as a server would have them, with full CUDA graphs for decoding."""
    sizes = sorted({count * (1 + draft) for count in (1, 2, 4, 8) if count <= slots})
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {
        "draft_tokens": draft,
        "max_num_seqs": slots,
        "max_model_len": context,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": caching,
        "logprobs_mode": "raw_logits",
        "disable_log_stats": False,
        **({"enforce_eager": True} if eager else {"compilation_config": graphs}),
    }


def main() -> int:
    """Runs it, writes JSON, returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument(
        "--budget", type=float, default=240, help="seconds for everything, the start included"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", choices=("flash", "mini"), default="flash")
    parser.add_argument("--options", type=json.loads, default=None, help="the ling section (JSON)")
    parser.add_argument("--draft", type=int, default=0, help="MTP draft tokens")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    budget, began = Budget(args.budget, _RESERVE), time.monotonic()
    os.environ["VLLM_LING_DISABLE"] = "0"

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    from vllm_ling.status import STATUS

    options = our_options() if args.options is None else args.options
    context = 8192 if args.model == "flash" else 4096
    with tempfile.TemporaryDirectory() as name:
        folder = seeded_folder(Path(name), args.model, args.layers)
        settings = engine_settings(args.draft, args.slots, context, not args.no_prefix_caching, args.eager)
        llm = start(folder, options, **settings)
    config = llm.llm_engine.vllm_config
    block = config.cache_config.block_size
    caching = config.cache_config.enable_prefix_caching  # a platform may turn it off
    # A draft gives up the last cached block, to see hidden states of its own.
    prefix = min((3 if args.draft else 2) * block + 9, context * 3 // 4)
    say(f"engine up; prefix caching {caching}, blocks of {block} tokens, shared beginnings of {prefix}")
    run = Run(llm, config.model_config.get_vocab_size(), prefix, args.slots, args.seed)
    before = run.probe()
    run.work(int(args.tokens * _WARM), budget, say)
    memory = gpu_memory()
    run.work(args.tokens, budget, say)
    llm.reset_prefix_cache()
    judged = memory_checks(memory, gpu_memory())
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    hits = int(counters.get("vllm:prefix_cache_hits", 0)) if caching else None
    found = checks(run.counts, hits, judged, probe_check(before, run.probe()), STATUS.as_dict()["faults"])
    reached = run.counts.tokens >= args.tokens
    result = {
        "provenance": provenance(),
        "asked": {k: v for k, v in vars(args).items() if k != "out"} | {"options": options, "prefix": prefix},
        "target_reached": reached,
        "counts": asdict(run.counts),
        "drafts": int(counters.get("vllm:spec_decode_num_drafts", 0)),
        "accepted": int(counters.get("vllm:spec_decode_num_accepted_tokens", 0)),
        "choices": STATUS.as_dict()["choices"],
        "checks": [asdict(check) for check in found],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for check in found:
        verdict = {True: "ok", False: "FAILED", None: "unknown"}[check.passed]
        print(f"{verdict:8} {check.name}: {check.found}")
    ending = "all tokens done" if reached else f"the budget of {args.budget:.0f} s ended it"
    say(f"{run.counts.tokens} tokens ({ending}); written: {args.out}")
    return int(any(check.passed is False for check in found))


if __name__ == "__main__":
    raise SystemExit(main())
