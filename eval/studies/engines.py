# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines in a process of their own and brings back logits, greedy tokens and vllm-ling's status.

A subprocess per group keeps stock runs free of the plugin and lets a broken engine fail alone; within a group engines
follow each other, which saves the import time.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_ling.eval.studies.child import SETTINGS


@dataclass(frozen=True)
class EngineSpec:
    """One engine and what it is asked.

    Attributes:
        model: folder of a checkpoint.
        prompts: token ids; every prompt is sent in one `generate` call, `concurrency` of them run at a time.
        first_logits: also return the full raw logits of each prompt's first new token.
        top_logits: also return this many raw logits per generated token.
        draft_tokens: MTP draft tokens, 0 for no speculation.
        options: the `ling` section of additional_config.
        sampling: fields of SamplingParams in place of greedy decoding; prompt n is sampled with seed n.
    """

    name: str
    model: str
    prompts: list[list[int]]
    dtype: str = "float32"
    max_tokens: int = 1
    concurrency: int = 4
    first_logits: bool = False
    top_logits: int = 0
    draft_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineRun:
    """What one engine answered.

    Attributes:
        tokens: generated ids per prompt.
        tops: per prompt and position, the best (token, raw logit) pairs, best first.
        logits: [prompts][vocab] raw logits of the first new token, empty unless asked for.
        accepted, drafts: vLLM's counters: accepted draft tokens and draft rounds.
        status: vllm-ling's record (see `status.Status`).
        error: the last lines of a failed engine's traceback; only set with `keep_going`.
        error: why the engine gave no answer; only with `keep_going`.
    """

    name: str
    seconds: float
    tokens: list[list[int]]
    tops: list[list[list[tuple[int, float]]]]
    logits: list[list[float]]
    accepted: int
    drafts: int
    status: dict[str, Any]
    error: str = ""

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification: 1 + accepted / rounds; None without speculation."""
        return 1 + self.accepted / self.drafts if self.drafts else None


class EngineError(RuntimeError):
    """The engine process failed; the message ends with its last output."""


def run_engines(
    specs: list[EngineSpec],
    *,
    stock: bool = False,
    timeout_s: float = 900,
    keep_going: bool = False,
    environment: dict[str, str] | None = None,
) -> list[EngineRun]:
    """Runs the engines one after another in one fresh process.

    Args:
        stock: with vllm-ling disabled.
        environment: more variables for the process.
        keep_going: record an engine that fails (`EngineRun.error`) and go on with the next.

    Raises:
        EngineError: if the process fails; its message holds the end of the output.
    """
    env = {
        **SETTINGS,
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_LING_DISABLE": "1" if stock else "0",
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "specs.json"), Path(folder, "runs.json")
        asked.write_text(json.dumps([asdict(spec) for spec in specs]))
        command = [
            sys.executable,
            "-m",
            "vllm_ling.eval.studies.engines",
            str(asked),
            str(answered),
            str(int(keep_going)),
        ]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode:
            raise EngineError(
                f"{[spec.name for spec in specs]} failed:\n{(done.stdout + done.stderr)[-8000:]}"
            )
        return [EngineRun(**run) for run in json.loads(answered.read_text())]


def _run(spec: EngineSpec) -> EngineRun:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from vllm_ling.hf_config import register_hf_config
    from vllm_ling.status import STATUS

    # Stock vLLM knows the model but not its config class; everything else stays stock.
    register_hf_config()
    for record in (STATUS.choices, STATUS.proofs, STATUS.faults):
        record.clear()
    started = time.monotonic()
    engine: dict[str, Any] = {
        "dtype": spec.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": spec.concurrency,
        "enable_prefix_caching": False,
        "logprobs_mode": "raw_logits",
        "max_logprobs": -1,
        "seed": 0,
        "disable_log_stats": False,
    }
    if torch.cuda.is_available():
        # These models are small, and other engines may come and go.
        engine |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30}
    if spec.options:
        engine["additional_config"] = {"ling": spec.options}
    if spec.draft_tokens:
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": spec.draft_tokens}
    # A start collects garbage some ten times, and would walk through all that was imported each time: most of its time
    # for a little model. The engine's end unfreezes.
    gc.freeze()
    llm = LLM(model=spec.model, **(engine | spec.engine))
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in spec.prompts]
    logits: list[list[float]] = []
    if spec.first_logits:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        for output in llm.generate(asked, params, use_tqdm=False):
            row = output.outputs[0].logprobs[0]
            logits.append([row[token].logprob for token in range(len(row))])
    fields = {"temperature": 0.0, **spec.sampling}
    each = [
        SamplingParams(
            max_tokens=spec.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=spec.top_logits or None,
            seed=number if spec.sampling else None,
            **fields,
        )
        for number in range(len(asked))
    ]
    outputs = [output.outputs[0] for output in llm.generate(asked, each, use_tqdm=False)]
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    run = EngineRun(
        name=spec.name,
        seconds=time.monotonic() - started,
        tokens=[list(output.token_ids) for output in outputs],
        tops=[[_best(position) for position in output.logprobs] for output in outputs]
        if spec.top_logits
        else [],
        logits=logits,
        accepted=int(counters.get("vllm:spec_decode_num_accepted_tokens", 0)),
        drafts=int(counters.get("vllm:spec_decode_num_drafts", 0)),
        status=STATUS.as_dict(),
    )
    del llm
    return run


def _best(position: Any) -> list[tuple[int, float]]:
    return sorted(((token, entry.logprob) for token, entry in position.items()), key=lambda pair: -pair[1])


def _main(asked: Path, answered: Path, keep_going: bool) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    runs = []
    for spec in json.loads(asked.read_text()):
        try:
            runs.append(asdict(_run(EngineSpec(**spec))))
        except Exception:  # recorded in the answer
            if not keep_going:
                raise
            error = traceback.format_exc()[-3000:]
            runs.append(asdict(EngineRun(spec["name"], 0, [], [], [], 0, 0, {}, error)))
        gc.collect()
        cleanup_dist_env_and_memory()
    answered.write_text(json.dumps(runs))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
