# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling bench decode`: ms per token of Ling-3.0-flash with random weights, our classes against stock vLLM's.

Each engine runs in a process of its own on the same machine, one after the other. A figure is the difference between a
long and a short answer to the same prompt, so that prefill and start-up cancel out. Random weights accept nothing, so
speculation is timed with vLLM's synthetic acceptance of a given length.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vllm_ling.errors import LingError

SHORT, LONG = 32, 288


@dataclass(frozen=True)
class Side:
    """One engine to time.

    Attributes:
        options: the `ling` section of additional_config; None is stock vLLM without the plugin.
        model, layers: see `engine.model_folder`.
        contexts: prompt lengths in tokens.
        draft_tokens, accept_length: MTP draft length (0: none) and the synthetic accept length.
        repeats: timed repeats after one that is thrown away.
        short, long: lengths of the two answers whose difference is taken.
    """

    options: dict[str, Any] | None
    model: str = "flash"
    layers: int = 42
    contexts: tuple[int, ...] = (128,)
    draft_tokens: int = 0
    accept_length: float = 0.0
    repeats: int = 3
    short: int = SHORT
    long: int = LONG


@dataclass(frozen=True)
class Decoded:
    """Milliseconds per emitted token after a prompt of `context` tokens: median, lowest, highest of the repeats."""

    context: int
    ms: float
    low: float
    high: float


@dataclass(frozen=True)
class Answer:
    """One engine's figures, its start in seconds and the plugin's choices."""

    decoded: list[Decoded]
    start_s: float
    choices: dict[str, list[str]]


def time_side(side: Side, timeout_s: float) -> Answer:
    """Runs one engine in a fresh process.

    Raises:
        LingError: it failed or took longer than `timeout_s`; with the end of its log.
    """
    what = "stock vLLM" if side.options is None else f"ling {side.options}"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        env = os.environ | {"VLLM_LING_DISABLE": "1" if side.options is None else "0"}
        command = [sys.executable, "-m", "vllm_ling.bench.decode", json.dumps(asdict(side)), str(answer)]
        log = Path(folder, "log")
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    command, env=env, stdout=output, stderr=output, check=False, timeout=timeout_s
                ).returncode
            except subprocess.TimeoutExpired:
                raise LingError(
                    f"bench decode: {what} took longer than {timeout_s:.0f} s (--timeout): {log.read_text()[-1500:]}"
                ) from None
        if code or not answer.exists():
            raise LingError(f"bench decode: {what} failed: {log.read_text()[-3000:]}")
        found = json.loads(answer.read_text())
    return Answer([Decoded(**row) for row in found["decoded"]], found["start_s"], found["choices"])


def run(sides: dict[str, Side], out: Path, timeout_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Times the sides (names "ours" and, to compare, "stock") and writes `{"provenance", "rows"}` to `out`.

    The file is written after every side, so an interruption loses only the running one.
    """
    from vllm_ling.eval.provenance import provenance

    result: dict[str, Any] = {"provenance": provenance(), "rows": [], "engines": {}}
    rows: dict[int, dict[str, Any]] = {}
    for name, side in sides.items():
        say(f"{name}: starting")
        answer = time_side(side, timeout_s)
        result["engines"][name] = asdict(side) | {"start_s": answer.start_s, "choices": answer.choices}
        for decoded in answer.decoded:
            workload = f"mtp{side.draft_tokens}@{side.accept_length:g}" if side.draft_tokens else "plain"
            row = rows.setdefault(decoded.context, {"workload": workload, "context": decoded.context})
            prefix = "" if name == "ours" else f"{name}_"
            row |= {f"{prefix}ms_per_token": decoded.ms, f"{prefix}spread_ms": [decoded.low, decoded.high]}
            say(
                f"{name}: context {decoded.context}: {decoded.ms:.3f} ms ({decoded.low:.3f} to {decoded.high:.3f})"
            )
        result["rows"] = list(rows.values())
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def decode(
    against: str | None,
    model: str,
    layers: int,
    contexts: list[int],
    drafts: int,
    accept: float,
    out: Path,
    timeout: int,
) -> int:
    """The command. Returns the exit code.

    Raises:
        LingError: an engine failed.
    """
    if drafts and not 1 <= accept <= drafts + 1:
        raise LingError(
            f"--accept-length {accept:g}: with --draft {drafts} it lies between 1 and {drafts + 1}"
        )
    started = time.monotonic()
    common: dict[str, Any] = {
        "model": model,
        "layers": layers,
        "contexts": tuple(contexts),
        "draft_tokens": drafts,
    }
    common["accept_length"] = accept if drafts else 0.0
    sides = {"ours": Side({"moe": "ling", "linear": "ling"}, **common)}
    if against == "stock":
        sides["stock"] = Side(None, **common)
    result = run(
        sides, out, timeout, lambda text: print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)
    )
    for row in result["rows"]:
        if "stock_ms_per_token" in row:
            ratio = row["stock_ms_per_token"] / row["ms_per_token"]
            print(f"{row['workload']}, context {row['context']}: {ratio:.2f} x as fast as stock vLLM")
    print(f"written: {out}")
    return 0


def _worker(side: Side) -> Answer:
    from vllm_ling.bench.engine import model_folder, start
    from vllm_ling.hf_config import register_hf_config
    from vllm_ling.status import STATUS

    register_hf_config()
    settings: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_model_len": max(side.contexts) + side.long + 64,
        "gpu_memory_utilization": 0.9,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    }
    if side.draft_tokens:
        settings["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": side.draft_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": side.accept_length,
        }
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        model = model_folder(Path(folder), side.model, side.layers, mtp=bool(side.draft_tokens))
        llm = start(model, side.options, **settings)
        started = time.monotonic() - began
    decoded = []
    for context in side.contexts:
        times = []
        for _ in range(side.repeats + 1):
            both = _generate(llm, context, side.long) - _generate(llm, context, side.short)
            times.append(1e3 * both / (side.long - side.short))
        decoded.append(Decoded(context, median(times[1:]), min(times[1:]), max(times[1:])))
    return Answer(decoded, started, {name: [c.choice, c.reason] for name, c in STATUS.choices.items()})


def _generate(llm: Any, context: int, tokens: int) -> float:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompt = TokensPrompt(prompt_token_ids=[17 + 31 * i % (vocabulary - 20) for i in range(context)])
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.monotonic()
    llm.generate([prompt], params, use_tqdm=False)
    return time.monotonic() - began


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asdict(_worker(Side(**json.loads(sys.argv[1]))))))
