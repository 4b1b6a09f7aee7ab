# SPDX-License-Identifier: Apache-2.0
"""Asks tiny-ling engines with a draft gate that judges by the bytes of Ling-3.0-flash; tiny-ling's own hardly rise.

Run as `python gate_on_cpu.py ASKED ANSWERED`: ASKED is a JSON list of `Case`s, ANSWERED gets a JSON list of `Answer`s.
"""

import dataclasses
import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.metrics.stat_logger import LingStatLogger
from vllm_ling.roofline.bytes import ByteModel
from vllm_ling.roofline.models import model_shape
from vllm_ling.spec_decode import gate_setup
from vllm_ling.spec_decode.gate import Costs, DraftGate
from vllm_ling.status import STATUS


@dataclass
class Case:
    """One engine; `gate` is the option. `lengths_by_lot`: drafted and verified are any numbers, none included.
    `abort`: requests that are dropped in the middle of their answers come first."""

    name: str
    prompts: list[list[int]]
    drafts: int
    gate: str = "off"
    concurrency: int = 1
    tokens: int = 40
    sampling: dict[str, Any] = field(default_factory=dict)
    abort: bool = False
    lengths_by_lot: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """`lengths`: how often so many draft tokens were verified; `counted`, `accepted`: vLLM's counters of draft tokens;
    `plain`: decode steps of requests without a draft token; `alarms`: of the guard; `preempted`: requests that were."""

    name: str
    tokens: list[list[int]]
    rounds: int
    counted: int
    accepted: int
    lengths: dict[int, int]
    plain: int
    together: int
    alarms: list[str]
    preempted: int
    choice: list[str]


def flash_costs(vllm_config: Any, most: int) -> Costs:
    """Bytes of Ling-3.0-flash."""
    model = ByteModel(model_shape("flash", "fp4"), head="fp8", context=1024)
    tokens = vllm_config.scheduler_config.max_num_seqs * (most + 1)
    return Costs([0.0, *(model.step_bytes(n) for n in range(1, tokens + 1))], model.draft_bytes())


class Lots(DraftGate):
    """A gate that draws lots: every length must give the same answers, whatever came before it."""

    _lots = random.Random(0)

    def steps(self, allowed: Collection[int] | None = None, least: int = 1) -> int:
        """Any number."""
        return self._lots.randint(1, self._most)

    def allot(self, batch: Sequence[Sequence[float]], allowed: Collection[int] | None = None) -> list[int]:
        """Any numbers."""
        return [self._lots.randint(0, len(request)) for request in batch]


class Watch:
    """What the scheduler really asked the model to verify."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        # Steps whose requests had different lengths.
        self.together = 0
        self.plain = 0
        watch, stock = self, Scheduler.schedule

        def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = stock(scheduler, *args, **kwargs)
            found = [len(drafts) for drafts in output.scheduled_spec_decode_tokens.values()]
            for request, drafts in output.scheduled_spec_decode_tokens.items():
                assert output.num_scheduled_tokens[request] >= len(drafts) + 1
            watch.lengths.update(found)
            watch.together += len(set(found)) > 1
            watch.plain += sum(
                scheduler.requests[request].num_output_tokens > 0
                and request not in output.scheduled_spec_decode_tokens
                for request in output.num_scheduled_tokens
            )
            return output

        Scheduler.schedule = schedule


def run(case: Case, watch: Watch) -> Answer:
    """Starts an engine, asks it, and stops it."""
    answer = ask(case, watch)
    gc.collect()
    cleanup_dist_env_and_memory()
    return answer


def ask(case: Case, watch: Watch) -> Answer:
    """Starts an engine and asks it."""
    STATUS.choices.clear()
    watch.lengths.clear()
    watch.together = watch.plain = 0
    gate_setup.DraftGate = Lots if case.lengths_by_lot else DraftGate  # type: ignore[misc]
    engine: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": case.concurrency,
        "seed": 0,
        "disable_log_stats": False,
        "additional_config": {"ling": {"draft_gate": case.gate}},
    }
    if case.drafts:
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": case.drafts}
    gc.freeze()  # as in `vllm_ling.eval.studies.engines`
    llm = LLM(model=str(tiny_ling_path()), **(engine | case.engine))
    guard = LingStatLogger(llm.llm_engine.vllm_config)._guard
    alarms: list[str] = []
    core = llm.llm_engine.engine_core
    stock = core.get_output

    def get_output() -> Any:
        outputs = stock()
        stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
        if stats is not None and guard is not None:
            seen = guard.observe(
                stats.num_drafts, stats.num_accepted_tokens_per_pos, stats.num_draft_tokens_per_pos
            )
            alarms.extend(event.alarm for event in seen if event.raised)
        return outputs

    core.get_output = get_output  # type: ignore[method-assign]
    params = [
        SamplingParams(
            max_tokens=case.tokens,
            ignore_eos=True,
            detokenize=False,
            seed=n,
            **{"temperature": 0.0, **case.sampling},
        )
        for n in range(len(case.prompts))
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in case.prompts]
    if case.abort:
        names = [f"gone-{number}" for number in range(case.concurrency)]
        for name, prompt in zip(names, prompts, strict=False):
            llm.llm_engine.add_request(name, prompt, params[0])
        for _ in range(6):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(names)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    choice = STATUS.choices.get("draft_gate")
    return Answer(
        name=case.name,
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        rounds=int(counters.get("vllm:spec_decode_num_drafts", 0)),
        counted=int(counters.get("vllm:spec_decode_num_draft_tokens", 0)),
        accepted=int(counters.get("vllm:spec_decode_num_accepted_tokens", 0)),
        lengths=dict(watch.lengths),
        plain=watch.plain,
        together=watch.together,
        alarms=alarms,
        preempted=int(counters.get("vllm:num_preemptions", 0)),
        choice=[choice.choice, choice.reason] if choice else [],
    )


def main(asked: Path, answered: Path) -> None:
    """All cases one after another, in this process."""
    gate_setup._costs = flash_costs
    watch = Watch()
    answers = [run(Case(**case), watch) for case in json.loads(asked.read_text())]
    answered.write_text(json.dumps([dataclasses.asdict(answer) for answer in answers]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
