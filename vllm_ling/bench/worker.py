# SPDX-License-Identifier: Apache-2.0
"""The user of one engine for `vllm-ling bench decode`: starts vLLM, times, then looks closer.

    python -m vllm_ling.bench.worker SIDE_AS_JSON ANSWER_FILE

This process has vLLM's front end (requests in, tokens out). The engine has a process of its own, as with `vllm serve`
and `LLM`, so that the two do not wait for each other; the closer looks are taken there (`looks.py`). All timing comes
before any watching and tracing, and the answer is written after each part, so that neither a slow context nor a
profiler that fails can cost a figure.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from vllm_ling.bench import looks
from vllm_ling.bench.host import Host
from vllm_ling.bench.processes import needing, tie_children
from vllm_ling.bench.remote import ask, during
from vllm_ling.bench.side import BATCH, PREFILL, Answer, Decoded, Extra, Side
from vllm_ling.bench.trace import Steps, read_steps
from vllm_ling.eval.provenance import clocks
from vllm_ling.eval.studies.seeded_engine import Requests

_LOOK = 24  # steps of a look: enough for a mean, few enough for a small trace
_SHORT_PROMPT = 128  # of the 32 sequences
_SETTLED = 16  # tokens before the clock starts: the first steps after a prompt still fill the pipeline
_NAMES = itertools.count()


def work(side: Side, save: Callable[[Answer], None]) -> None:
    """Measures `side`, calling `save` with everything known so far."""
    llm, started = engine(side)
    facts = ask(llm, looks.facts)
    answer = Answer([], started, facts["choices"], async_scheduling=facts["async_scheduling"])
    answer.engine = "own process" if facts["process"] != os.getpid() else "the bench's process"
    with needing(facts["process"]):
        _measure(llm, side, answer, save)


def _measure(llm: Any, side: Side, answer: Answer, save: Callable[[Answer], None]) -> None:
    try:
        answer.weights_bytes = ask(llm, looks.weights_bytes)
    except Exception as error:
        answer.notes.append(f"no memory of the weights: {error!r}")
    save(answer)
    if side.extras:
        for extra in (_prefill, _batch):
            answer.extras.append(extra(llm, side))
            save(answer)
        return
    counts = []
    for context in side.contexts:
        decoded, replays = _decode(llm, side, context)
        answer.decoded.append(decoded)
        counts.append(replays)
        answer.clocks = clocks()
        save(answer)
    for at, replays in enumerate(counts):
        try:
            answer.decoded[at] = _look(llm, side, answer.decoded[at], replays)
        except Exception as error:
            answer.notes.append(f"context {answer.decoded[at].context}: no graph time: {error!r}")
        save(answer)
    try:
        answer.steps = traced(llm, side.contexts[0], round(_LOOK * side.tokens_per_step))
    except Exception as error:
        answer.notes.append(f"no trace: {error!r}")
    save(answer)


def engine(side: Side, memory: float = 0.9, own_process: bool = True) -> tuple[Any, float]:
    """The engine of a side and the seconds that it took to start; `memory` is the share of the GPU's it may take.

    `own_process`: see `engine.start`.
    """
    from vllm_ling.bench.engine import model_folder, start
    from vllm_ling.hf_config import register_hf_config

    register_hf_config()
    longest = PREFILL if side.extras else max(side.contexts)
    settings: dict[str, Any] = {
        "max_num_seqs": BATCH if side.extras else 1,
        "max_model_len": longest + side.tokens + 64,
        "gpu_memory_utilization": memory,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32] if side.extras else [1, 2, 4, 8],
        },
    }
    if side.extras:
        settings["max_num_batched_tokens"] = PREFILL
    if side.draft_tokens:
        settings["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": side.draft_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": side.accept_length,
        }
        if side.options is None:
            # The best that stock has; ours shares its FP8 head with the draft anyway.
            settings["speculative_config"]["draft_lm_head_quantization"] = "fp8"
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        model = model_folder(Path(folder), side.model, side.layers, mtp=bool(side.draft_tokens))
        llm = start(model, side.options, own_process, **settings)
        return llm, time.monotonic() - began


def generate(llm: Any, context: int, tokens: int, sequences: int = 1) -> float:
    """Seconds to write `tokens` tokens after each of `sequences` different prompts of `context` tokens, greedy."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in _prompts(llm, context, sequences)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    return time.monotonic() - began


def _prompts(llm: Any, context: int, sequences: int) -> list[list[int]]:
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size() - 20
    return [[17 + (31 * i + 7 * n) % vocabulary for i in range(context)] for n in range(sequences)]


def token_times(llm: Any, context: int, tokens: int, sequences: int = 1) -> float:
    """Seconds a token of each sequence, on the wall clock from its `_SETTLED`th token to its last.

    Steps the engine as `LLM.generate` does, which has no clock between its tokens: prompt and set-up stay out.
    """
    requests = Requests(llm)
    for prompt in _prompts(llm, context, sequences):
        requests.add(f"timed {next(_NAMES)}", prompt, tokens)
    began: tuple[float, int] | None = None
    now, count = time.perf_counter(), 0
    while requests.running:
        requests.step()
        lengths = [len(answer) for answer in requests.tokens.values()]
        if sum(lengths) > count:
            now, count = time.perf_counter(), sum(lengths)
        if began is None and min(lengths) >= _SETTLED:
            began = now, count
    if began is None or count == began[1]:
        raise ValueError(f"{count} tokens are too few to time")
    return (now - began[0]) * sequences / (count - began[1])


def traced(llm: Any, context: int, tokens: int) -> Steps:
    """The steps of one answer under the profiler."""
    _, steps = during(llm, lambda: generate(llm, context, tokens), looks.trace)
    return read_steps(steps)


def _times(once: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Median, lowest and highest of the repeats in milliseconds; the first call is thrown away."""
    times = [1e3 * once() for _ in range(repeats + 1)][1:]
    return median(times), min(times), max(times)


def _decode(llm: Any, side: Side, context: int) -> tuple[Decoded, dict[int, int]]:
    def times() -> tuple[float, float, float]:
        return _times(lambda: token_times(llm, context, side.tokens), side.repeats)

    found, replays = during(llm, times, looks.replays)
    return Decoded(context, *found), replays


def _look(llm: Any, side: Side, decoded: Decoded, replays: dict[int, int]) -> Decoded:
    context = decoded.context
    few = round(_LOOK * side.tokens_per_step)
    _, graph = during(llm, lambda: generate(llm, context, few), looks.slowest_graph)
    length = None
    if side.draft_tokens and replays.get(graph):
        # The first token of an answer comes from prefill.
        tokens = (side.repeats + 1) * (side.tokens - 1)
        length = tokens / replays[graph]
    found = replace(decoded, graph_ms=ask(llm, looks.graph_ms, graph), accept_length=length)
    _, host = during(llm, lambda: token_times(llm, context, side.tokens), looks.host, graph)
    return replace(found, host=None if host is None else Host(**host))


def _prefill(llm: Any, side: Side) -> Extra:
    return Extra(f"prefill{PREFILL}", *_times(lambda: generate(llm, PREFILL, 1), side.repeats))


def _batch(llm: Any, side: Side) -> Extra:
    return Extra(
        f"batch{BATCH}", *_times(lambda: token_times(llm, _SHORT_PROMPT, side.tokens, BATCH), side.repeats)
    )


if __name__ == "__main__":
    from vllm_ling.eval.files import write_json

    tie_children()
    work(Side(**json.loads(sys.argv[1])), lambda answer: write_json(Path(sys.argv[2]), asdict(answer)))
