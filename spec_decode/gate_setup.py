# SPDX-License-Identifier: Apache-2.0
"""Puts the draft gate into a server: what it needs, what it refuses, and its parts once the model is loaded.

The seam is vLLM's worker class (`--worker-cls`), the same for both model runners: without asynchronous scheduling the
engine asks the worker for the draft tokens of every request (`take_draft_token_ids`) before it schedules their
verification, and what the worker leaves out is neither scheduled nor counted. Asynchronous scheduling fixes the number
of tokens before the drafts exist, so it is switched off.
"""

from dataclasses import dataclass
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.options import parse_options
from vllm_ling.spec_decode.gate import Costs, DraftGate
from vllm_ling.spec_decode.gate_graphs import covered_lengths, covered_steps
from vllm_ling.spec_decode.round_times import RoundTimes
from vllm_ling.spec_decode.served_gate import ServedGate
from vllm_ling.status import choose, warning

WORKER = "vllm_ling.spec_decode.gated_worker.GatedWorker"
CPU_WORKER = "vllm_ling.spec_decode.gated_worker_cpu.GatedCPUWorker"
# Costs of more tokens in a step go on in a straight line: by then every expert is read.
_MOST_TOKENS = 512


@dataclass(frozen=True)
class GateFacts:
    """What the gate depends on.

    Attributes:
        method: `speculative_config.method`; None without speculation.
        ranks: processes that the model is spread over, of all kinds of parallelism.
        asynchronous: what the user said of asynchronous scheduling; None for nothing.
        worker: `--worker-cls`.
        v2: whether the V2 model runner serves.
        graphs: whether CUDA graphs are captured.
        sampling: `draft_sample_method`.
        local_argmax: `use_local_argmax_reduction`.
        own_schedule: whether the user gave draft lengths by batch size.
    """

    method: str | None
    ranks: int = 1
    asynchronous: bool | None = None
    worker: str = "auto"
    v2: bool = False
    graphs: bool = False
    sampling: str = "greedy"
    local_argmax: bool = False
    own_schedule: bool = False


def refuse(facts: GateFacts) -> None:
    """Checks whether the gate can do what it says.

    Raises:
        LingError: naming what speaks against it.
    """
    against = {
        "nothing drafts; add --speculative-config with method mtp": facts.method != "mtp",
        f"{facts.ranks} ranks would each have to come to the same lengths, which is not supported": facts.ranks
        > 1,
        "--async-scheduling fixes the number of verified tokens before they are drafted; leave it out": bool(
            facts.asynchronous
        ),
        f"--worker-cls {facts.worker} is in its place": facts.worker not in ("auto", WORKER, CPU_WORKER),
        "the V1 model runner has CUDA graphs for num_speculative_tokens + 1 tokens only, and shorter verifications "
        "would run without; use the V2 runner or --enforce-eager": facts.graphs and not facts.v2,
        f"draft_sample_method {facts.sampling}: lengths chosen by sampled drafts would change what is sampled": (
            facts.sampling != "greedy"
        ),
        "use_local_argmax_reduction computes no probabilities": facts.local_argmax,
        "num_speculative_tokens_per_batch_size chooses lengths too; leave one of them out": facts.own_schedule,
    }
    for reason, holds in against.items():
        if holds:
            raise LingError(f"ling.draft_gate: {reason}")


def set_up(vllm_config: Any, cpu: bool) -> None:
    """Prepares a vLLM config under construction for the gate, if it is asked for.

    Raises:
        LingError: see `refuse`.
    """
    option = parse_options(vllm_config.additional_config).draft_gate
    draft, parallel, scheduler = (
        vllm_config.speculative_config,
        vllm_config.parallel_config,
        vllm_config.scheduler_config,
    )
    if option == "off":
        return
    v2 = bool(vllm_config.use_v2_model_runner)
    facts = GateFacts(
        method=getattr(draft, "method", None),
        ranks=parallel.world_size * parallel.data_parallel_size,
        asynchronous=scheduler.async_scheduling,
        worker=parallel.worker_cls,
        v2=v2,
        graphs=not cpu and _graphs(vllm_config),
        sampling=getattr(draft, "draft_sample_method", "greedy"),
        local_argmax=getattr(draft, "use_local_argmax_reduction", False),
        own_schedule=getattr(draft, "num_speculative_tokens_per_batch_size", None)
        not in (None, _schedule(vllm_config)),
    )
    refuse(facts)
    scheduler.async_scheduling = False
    parallel.worker_cls = CPU_WORKER if cpu else WORKER
    if facts.graphs:
        draft.num_speculative_tokens_per_batch_size = _schedule(vllm_config)


def _schedule(vllm_config: Any) -> list[tuple[int, int, int]]:
    """vLLM's draft lengths by batch size, all k: the key under which it captures graphs of several lengths."""
    k = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0)
    return [(1, vllm_config.scheduler_config.max_num_seqs, k)]


def _graphs(vllm_config: Any) -> bool:
    mode = vllm_config.compilation_config.cudagraph_mode
    return not vllm_config.model_config.enforce_eager and (mode is None or mode.has_full_cudagraphs())


def build(vllm_config: Any, runner: Any) -> ServedGate | None:
    """The gate of a loaded model, or None with the reason recorded."""
    option = parse_options(vllm_config.additional_config).draft_gate
    most = vllm_config.speculative_config.num_speculative_tokens
    drafter = getattr(runner, "speculator", None) or runner.drafter
    confidence = getattr(drafter.model, "confidence", None)
    if confidence is None:
        _off(f"{type(drafter.model).__name__} does not tell how sure it is")
        return None
    try:
        costs = _costs(vllm_config, most)
    except LingError as error:
        _off(f"the byte model does not know this checkpoint: {error}")
        return None
    v2 = bool(vllm_config.use_v2_model_runner)
    limits: dict[str, Any] = {}
    covered = "any length, as no CUDA graph is in use"
    if v2 and runner.cudagraph_manager is not None and runner.cudagraph_manager.graphs:
        limits["lengths"] = covered_lengths(
            [runner.cudagraph_manager, drafter.prefill_cudagraph_manager], most
        )
        limits["steps"] = covered_steps(drafter.decode_cudagraph_manager, most)
        lengths = limits["lengths"](1)
        if lengths is None or set(lengths) <= {most}:
            _off(f"CUDA graphs of one request cover {lengths} draft tokens, and no shorter verification")
            return None
        covered = f"CUDA graphs for {', '.join(map(str, lengths))} draft tokens; one length for all requests of a batch"
    choose(
        "draft_gate",
        option,
        f"verifies 0 to {most} draft tokens, {covered}; no asynchronous scheduling; "
        f"a second token costs {costs.verify[2] / costs.verify[1] - 1:.0%} of the first in bytes",
    )
    times = RoundTimes() if option == "times" else None
    gate = DraftGate(costs, most)
    return ServedGate(gate, costs, confidence.read, times=times, **limits)


def _costs(vllm_config: Any, most: int) -> Costs:
    from vllm_ling.roofline.served import served_bytes

    model = served_bytes(vllm_config)
    tokens = min(_MOST_TOKENS, vllm_config.scheduler_config.max_num_seqs * (most + 1))
    return Costs([0.0, *(model.step_bytes(n) for n in range(1, tokens + 1))], model.draft_bytes())


def _off(reason: str) -> None:
    """Says that the gate does not run."""
    warning(
        f"ling.draft_gate cannot be honoured ({reason}); every draft token is verified, and asynchronous scheduling "
        "stays off: start without the option"
    )
    choose("draft_gate", "off", reason)
