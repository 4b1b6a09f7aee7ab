# SPDX-License-Identifier: Apache-2.0
"""One engine of the full-size comparison: runs its workloads and saves every tapped state by sequence and position."""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_ling.eval.studies.seeded_engine import Requests, seeded_folder, start
from vllm_ling.eval.studies.seeded_weights import LANES
from vllm_ling.eval.studies.taps import Recorder, Row, Step, gather
from vllm_ling.eval.studies.workloads import ANSWER, DRAFTED, LENGTHS, PLAIN, STOCK, Workload, drive, texts

KV_CACHE_BYTES = 4 << 30
PREFILL = "decode 8"  # the workload whose prompts are compared too


@dataclass(frozen=True)
class SideSpec:
    """One engine.

    Attributes:
        options: the `ling` section; None is stock vLLM.
        model, layers: see `model_folder`.
        taps: layers after which the residual stream is compared.
        draft_tokens: MTP draft length; 0 decodes plainly.
    """

    options: dict[str, Any] | None
    model: str
    layers: int
    taps: tuple[int, ...]
    draft_tokens: int = 0

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """What this engine is asked."""
        if self.draft_tokens:
            return DRAFTED
        return STOCK if self.options is None else PLAIN


States = dict[int, dict[str, Tensor]]
"""Per lane: "positions" [n] and, per tap, values [n, width]; the logits have "logits positions" of their own."""


def stack(rows: dict[int, Row], names: Sequence[str]) -> dict[str, Tensor]:
    """The rows of one lane as tensors, in the order of their positions."""
    found: dict[str, Tensor] = {"positions": torch.tensor(sorted(rows))}
    for name in names:
        values = {position: rows[position].tap(name) for position in sorted(rows)}
        kept = {position: value for position, value in values.items() if value is not None}
        if name == "logits":
            found["logits positions"] = torch.tensor(list(kept))
        if kept:
            found[name] = torch.stack(list(kept.values()))
    return found


def run_side(spec: SideSpec) -> dict[str, Any]:
    """Starts the engine and runs every workload."""
    from vllm_ling.status import STATUS

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = seeded_folder(Path(name), spec.model, spec.layers)
        vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        llm = start(
            folder,
            spec.options,
            spec.draft_tokens,
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=2048,
            disable_log_stats=False,
            # Plenty for these texts, and independent of what else the GPU holds.
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )
    started = time.monotonic() - began
    requests, lane_texts, kept = Requests(llm), texts(vocabulary), []
    llm.apply_model(lambda model: kept.append(Recorder(model, spec.taps)))
    recorder: Recorder = kept[0]
    states, tokens, fused = {}, {}, {}
    for workload in spec.workloads:
        names = drive(workload, requests, lane_texts)
        steps: list[Step] = recorder.take()
        fused[workload.name] = sum(step.fused for step in steps)
        tokens[workload.name] = all(
            requests.tokens[request] == lane_texts[lane][-ANSWER:] for lane, request in names.items()
        )
        asked = {lane: lane_texts[lane] for lane in workload.lanes}
        states[workload.name] = _states(gather(steps, asked, LANES), spec, workload.name == PREFILL)
        print(f"{workload.name}: {len(steps)} steps, {fused[workload.name]} fused", flush=True)
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "states": states,
        "tokens": tokens,
        "fused": fused,
        "start_s": round(started, 1),
        "seconds": round(time.monotonic() - began, 1),
        "drafts": int(counters.get("vllm:spec_decode_num_drafts", 0)),
        "accepted": int(counters.get("vllm:spec_decode_num_accepted_tokens", 0)),
        "status": STATUS.as_dict(),
    }


def _states(found: dict[int, dict[int, Row]], spec: SideSpec, prompts: bool) -> States:
    names = [*map(str, spec.taps), "final", "logits"]
    return {
        lane: stack({p: row for p, row in rows.items() if prompts or p >= LENGTHS[lane]}, names)
        for lane, rows in found.items()
    }


def as_spec(text: str) -> SideSpec:
    """A spec from its fields as JSON."""
    fields = json.loads(text)
    return SideSpec(**(fields | {"taps": tuple(fields["taps"])}))


if __name__ == "__main__":
    torch.save(run_side(as_spec(sys.argv[1])), sys.argv[2])
