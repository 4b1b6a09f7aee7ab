# SPDX-License-Identifier: Apache-2.0
"""Evidence for doctor's tests: a sound server's log, metrics, checkpoint, flags and GPU, and ways to damage each."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.checkpoint_files import Tensors, declared_tensors, write_checkpoint
from vllm_ling.checkpoint.synthetic import mini_config
from vllm_ling.doctor.facts import known as vllm_names
from vllm_ling.doctor.facts.checkpoint import read_checkpoint
from vllm_ling.doctor.facts.environment import read_environment
from vllm_ling.doctor.facts.known import vllm_folder
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.server import parse_samples, put_samples
from vllm_ling.doctor.facts.settings import put_command
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.metrics.collector import LingCollector
from vllm_ling.spec_decode.guard import DraftGuard

FOLDER = Path(__file__).parent / "evidence"
GPU_LOG = (FOLDER / "gpu-0.33.log").read_text()
CONFIG = mini_config("flash", "fp4", mtp=True, clamp=4)
H200 = {
    "gpu.names": ["NVIDIA H200"],
    "gpu.capability": 90,
    "gpu.unified": False,
    "gpu.memory_bytes": 150_754_820_096,
}
GB10 = {
    "gpu.names": ["NVIDIA GB10"],
    "gpu.capability": 121,
    "gpu.unified": True,
    "gpu.memory_bytes": 128_500_000_000,
    "gpu.available_bytes": 121_000_000_000,
}
NO_GPU: dict[str, Any] = {"gpu.names": []}
FLAGS = (
    "--max-num-seqs 4 --max-model-len 32768 --gpu-memory-utilization 0.85 --moe-backend humming "
    "--reasoning-parser ling3 --tool-call-parser ling3 --enable-auto-tool-choice --speculative-config"
)
WORDS = (*FLAGS.split(), '{"method": "mtp", "num_speculative_tokens": 3}')
GPU_INFO = {
    "model": "/models/ling",
    "device": "cuda",
    "runner": "v2",
    "quantization": "ling",
    "head_dtype": "bfloat16",
    "dtype": "bfloat16",
    "method": "mtp",
    "k": "3",
    "draft_head_quantization": "None",
    "enforce_eager": "False",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "capture_sizes": "[1, 2, 4, 8, 12, 16, 24, 32]",
    "moe_backend": "humming",
    "max_num_seqs": "4",
    "max_model_len": "32768",
    "tensor_parallel_size": "1",
    "inject_fault": "none",
    "on_fault": "fail",
    "lm_head": "auto",
    "moe": "ling",
    "linear": "ling",
    "decode": "auto",
}
_FUSED = "decode and verification of up to 8 tokens"
_CHOICES = {
    "lm_head": ("fp8_online", "auto: halves the bytes"),
    "moe mxfp4": ("humming", "ling.moe=ling: prefill and large batches"),
    "moe backend": ("HUMMING", "Mxfp4MoEMethod"),
    "moe decode": ("ling", "ling.moe=ling: up to 8 tokens in one launch"),
    "linear 20480 x 2560": ("ling", "up to 8 tokens with BF16 activations, vLLM's GEMM above"),
    "target decode": ("fused", "up to 8 tokens; ling.decode=auto"),
    f"target path: {_FUSED}": ("fused", "ling.decode=auto"),
    "target path: a prompt is read": ("layers", "ling.decode=auto"),
    "target path: more than 8 tokens": ("layers", "ling.decode=auto"),
    "draft decode": ("fused", "up to 8 tokens; ling.decode=auto"),
    f"draft path: {_FUSED}": ("fused", "ling.decode=auto"),
}


def chosen(*leave: str, **changes: tuple[str, str]) -> dict[str, Any]:
    """The record's choices with changes (`_` for a space in their names) and without some, as status.py writes them."""
    choices = _CHOICES | {name.replace("_", " "): choice for name, choice in changes.items()}
    return {
        what: {"what": what, "choice": choice, "reason": reason}
        for what, (choice, reason) in choices.items()
        if not what.startswith(leave)
    }


GPU_RECORD: dict[str, Any] = {
    "state": "active",
    "reason": "",
    "choices": chosen(),
    "proofs": {
        "head_probe": "top-1 agreement 95.7%",
        "draft_head": "the draft's head is the target's module object",
        "target_decode": "84 parts agree with vLLM's layers, stream and states; the furthest is layer 17 mlp, 0.0212",
        "draft_decode": "2 parts agree with vLLM's layers, stream and states; the furthest is layer 0 mlp, 0.0105",
    },
    "faults": {},
}
# What a minute of sound service adds to the counters.
GPU_TRAFFIC: dict[str, float] = {
    "vllm:spec_decode_num_drafts_total": 200,
    "vllm:spec_decode_num_draft_tokens_total": 600,
    "vllm:spec_decode_num_accepted_tokens_total": 336,
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 156,
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 108,
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 72,
    "vllm:num_preemptions_total": 0,
    "vllm:prefix_cache_queries_total": 30_000,
    "vllm:prefix_cache_hits_total": 6_000,
    'vllm:request_success_total{finished_reason="stop"}': 9,
    'vllm:request_success_total{finished_reason="length"}': 1,
}
GAUGES: dict[str, float] = {
    "vllm:num_requests_running": 1,
    'vllm:engine_sleep_state{sleep_state="awake"}': 1,
    'vllm:engine_sleep_state{sleep_state="discard_all"}': 0,
    'vllm:cache_config_info{enable_prefix_caching="True",gpu_memory_utilization="0.85",'
    'kv_cache_max_concurrency="40.0"}': 1,
}
# Counters never start at zero, so that an average since boot would be noticed.
_BOOT = 100_000.0


@dataclass(frozen=True)
class Live:
    """A server's two pages. `record` None is a server without the plugin; `others` are more processes with records."""

    traffic: Mapping[str, float] = field(default_factory=lambda: GPU_TRAFFIC)
    gauges: Mapping[str, float] = field(default_factory=lambda: GAUGES)
    info: Mapping[str, str] = field(default_factory=lambda: GPU_INFO)
    record: Mapping[str, Any] | None = field(default_factory=lambda: GPU_RECORD)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    level_2_sleeps: int = 0
    acceptance: tuple[int, ...] | None = (160, 120, 80)

    def pages(self, folder: Path) -> tuple[str, str]:
        """/metrics before and after the traffic."""
        own = ""
        if self.record is not None:
            folder.mkdir(exist_ok=True)
            processes = {"EngineCore": self.record, **self.others}
            for number, (process, record) in enumerate(processes.items()):
                (folder / f"{number}.json").write_text(json.dumps({"process": process, "record": record}))
            collector = _OneProcess(folder, self.info, None)
            collector.level_2_sleeps = self.level_2_sleeps
            if self.acceptance is not None:  # of 200 rounds, by position
                collector.guard = DraftGuard(len(self.acceptance))
                collector.guard.observe(200, list(self.acceptance), [200] * len(self.acceptance))
            registry = CollectorRegistry()
            registry.register(collector)
            own = generate_latest(registry).decode()
        gauges = "".join(f"{name} {value}\n" for name, value in self.gauges.items())
        before = "".join(f"{name} {_BOOT}\n" for name in self.traffic)
        after = "".join(f"{name} {_BOOT + value}\n" for name, value in self.traffic.items())
        return before + gauges + own, after + gauges + own


class _OneProcess(LingCollector):
    """The collector without the test process's own record."""

    def collect(self) -> Any:
        for family in super().collect():
            family.samples = [s for s in family.samples if s.labels.get("process") != "APIServer"]
            yield family


@dataclass(frozen=True)
class Evidence:
    """What a run of doctor is given; None: that source was not named."""

    words: tuple[str, ...] | None = None
    log: str | None = None
    live: Live | None = None
    gpu: Mapping[str, Any] = field(default_factory=lambda: H200)
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = field(default_factory=lambda: CONFIG)
    tensors: Callable[[Tensors], None] | None = None
    files: Callable[[Path], None] | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    chat_template: bool = True
    vllm_source: bool = True

    def facts(self, folder: Path) -> Facts:
        """Everything doctor would know, through its own readers."""
        facts = Facts()
        for key, value in {"installed.humming": True, **self.known, **self.gpu}.items():
            facts.put(key, value, "test")
        if self.live is not None:
            facts.sources.add("live")
            facts.put("server.version", "0.33.0", "/version")
            before, after = self.live.pages(folder / "records")
            put_samples(facts, parse_samples(before), parse_samples(after), "/metrics over 60 s")
        if self.log is not None:
            (folder / "server.log").write_text(self.log)
            read_log(facts, folder / "server.log")
        model = None if self.config is None else str(self.checkpoint(folder / "model"))
        if self.words is not None:
            put_command(facts, [model or "no/such/model", *self.words])
        with mock.patch.object(vllm_names, "vllm_folder", vllm_folder if self.vllm_source else _no_vllm):
            if not self.vllm_source:
                vllm_names.known_flags.cache_clear()
            read_environment(facts, {"HOME": str(folder), **self.env})
        read_checkpoint(facts, model or "no/such/model")
        return facts

    def checkpoint(self, folder: Path) -> Path:
        """Headers without data."""
        assert self.config is not None
        tensors = declared_tensors({**CONFIG, "num_nextn_predict_layers": 1})
        if self.tensors is not None:
            self.tensors(tensors)
        write_checkpoint(folder, self.config, tensors)
        if self.chat_template:
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        if self.files is not None:
            self.files(folder)
        return folder


def _no_vllm() -> Path:
    raise OSError("vllm is not installed")


STATIC = Evidence(words=WORDS)
LOG = Evidence(log=GPU_LOG)
LIVE = Evidence(live=Live())


def lines(evidence: Evidence, *edits: tuple[str, str]) -> Evidence:
    """The evidence with (regular expression, replacement) applied to its log; each must change something."""
    text = evidence.log
    assert text is not None
    for pattern, replacement in edits:
        changed = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        assert changed != text, pattern
        text = changed
    return dataclasses.replace(evidence, log=text)


def without(evidence: Evidence, *patterns: str) -> Evidence:
    """The evidence without the log lines that match."""
    return lines(evidence, *((rf"^.*(?:{pattern}).*\n", "") for pattern in patterns))


def live(evidence: Evidence, **changes: Any) -> Evidence:
    """The evidence with parts of its live server changed; mappings are merged, None values removed."""
    assert evidence.live is not None
    merged = {}
    for name, value in changes.items():
        old = getattr(evidence.live, name)
        if isinstance(value, dict) and isinstance(old, Mapping):
            value = {k: v for k, v in {**old, **value}.items() if v is not None}
        merged[name] = value
    return dataclasses.replace(evidence, live=dataclasses.replace(evidence.live, **merged))


def but(evidence: Evidence, **changes: Any) -> Evidence:
    """The evidence with fields replaced."""
    return dataclasses.replace(evidence, **changes)


def config(**changes: Any) -> dict[str, Any]:
    """config.json with changes; None removes a key."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
