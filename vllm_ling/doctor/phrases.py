# SPDX-License-Identifier: Apache-2.0
"""What doctor looks for in logs and /metrics: the one place to touch when vLLM changes its wording.

Each phrase names the vLLM source file that writes it and a literal piece of that source. A test looks for the literal
in the installed vLLM; for a server of a version outside VERSIONS nothing is read from the log, so its checks are
unknown.
"""

import re
from dataclasses import dataclass

VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True)
class Phrase:
    """A log phrase: the pattern with the facts as groups, and where it comes from.

    Attributes:
        marker: literal piece of the line, for a cheap first look.
        source: file under `vllm/` per version; "" for this project's own lines.
        literal: piece of that file from which the line is made.
    """

    pattern: re.Pattern[str]
    marker: str
    source: dict[str, str]
    literal: str


def _phrase(pattern: str, marker: str, source: str | dict[str, str], literal: str = "") -> Phrase:
    files = dict.fromkeys(VERSIONS, source) if isinstance(source, str) else source
    return Phrase(re.compile(pattern), marker, files, literal or marker)


_ORACLE = "model_executor/layers/fused_moe/oracle/"
PHRASES: dict[str, Phrase] = {
    "arguments": _phrase(
        r"non-default args: (\{.*\})$",
        "non-default args: ",
        {"0.32": "entrypoints/serve/utils/api_utils.py", "0.33": "entrypoints/common/startup.py"},
    ),
    "engine": _phrase(
        r"Initializing a V1 LLM engine \(v([^)]*)\) with config: (.*)$",
        "Initializing a V1 LLM engine (v",
        "v1/engine/core.py",
    ),
    "architecture": _phrase(r"Resolved architecture: (\w+)", "Resolved architecture: ", "config/model.py"),
    "plugin_failed": _phrase(
        r"Failed to load plugin (ling)\b", "Failed to load plugin ", "plugins/__init__.py"
    ),
    # Listed for the group of stat loggers, whether it is then loaded or left out.
    "plugin_listed": _phrase(
        r"- ling -> vllm_ling\.", "- ling -> vllm_ling.", "plugins/__init__.py", '"- %s -> %s"'
    ),
    "plugin_error": _phrase(
        r"^(?:\([^)]*\) (?:ERROR .*?\] )?)?((?:ImportError|ModuleNotFoundError|AttributeError|SyntaxError): .*)$",
        "Error: ",
        "",
    ),
    "moe_mxfp4": _phrase(
        r"Using '([A-Z0-9_]+)' Mxfp4 MoE backend", "' Mxfp4 MoE backend.", _ORACLE + "mxfp4.py"
    ),
    "moe_mxfp4_fallback": _phrase(
        r"(No Mxfp4 MoE backend supports activation=.*)$",
        "No Mxfp4 MoE backend supports activation=",
        {"0.33": _ORACLE + "mxfp4.py"},
    ),
    "moe_fp8": _phrase(r"Using (\S+) Fp8 MoE backend out", " Fp8 MoE backend out ", _ORACLE + "fp8.py"),
    "moe_int4": _phrase(
        r"Using '([^']+)' WNA16 MoE backend", "' WNA16 MoE backend.", _ORACLE + "int_wna16.py"
    ),
    "moe_unquantized": _phrase(
        r"Using (.+?) Unquantized MoE backend out",
        " Unquantized MoE backend out ",
        _ORACLE + "unquantized.py",
    ),
    "linear_kernel": _phrase(
        r"Selected (\w+) for (\w+)",
        "Selected ",
        "model_executor/kernels/linear/__init__.py",
        '"Selected %s for %s"',
    ),
    "e8m0": _phrase(
        r"DeepGEMM E8M0 (enabled|disabled)", "DeepGEMM E8M0 ", "utils/deep_gemm.py", "DeepGEMM E8M0 enabled"
    ),
    "runner_v1": _phrase(
        r"using the V1 model runner instead",
        "using the V1 model runner instead",
        "config/vllm.py",
        "V1 model runner",
    ),
    "graphs_off": _phrase(
        r"Overriding cudagraph_mode %?\S+ to (NONE)", "Overriding cudagraph_mode ", "config/vllm.py"
    ),
    "graphs_done": _phrase(
        r"Graph capturing finished in (\d+) secs, took ([\d.]+) GiB",
        "Graph capturing finished in ",
        "v1/worker/gpu_model_runner.py",
    ),
    "kv_cache": _phrase(
        r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x",
        "Maximum concurrency for ",
        "v1/core/kv_cache_utils.py",
    ),
    "prefix_off": _phrase(
        r"((?:Disabling prefix caching|.*forcing chunked prefill and prefix caching to be disabled).*)$",
        "prefix caching",
        "model_executor/layers/attention/mla_attention.py",
        "Disabling prefix caching for ",
    ),
    "unknown_variable": _phrase(
        r"Unknown vLLM environment variable detected: (\w+)",
        "Unknown vLLM environment variable detected: ",
        "platforms/interface.py",
    ),
    "compiled": _phrase(
        r"Compiling a graph for compile range (.*) takes ([\d.]+) s",
        "Compiling a graph for compile range ",
        "compilation/backends.py",
    ),
    "cached": _phrase(
        r"Directly load the compiled graph\(s\) for compile range",
        "Directly load the compiled graph(s) for compile",
        "compilation/backends.py",
    ),
    "draft_model": _phrase(
        r"Loading drafter model", "Loading drafter model", "v1/worker/gpu_model_runner.py"
    ),
    "asleep": _phrase(
        r"to (fall asleep)\.|sleep\?level=(\d)|(level) 2 sleep|wake_up",
        "sleep",
        "v1/executor/abstract.py",
        "seconds to fall asleep",
    ),
    "spec_metrics": _phrase(
        r"Mean acceptance length: ([\d.]+), .*Accepted: (\d+) tokens, Drafted: (\d+) tokens, "
        r"Per-position acceptance rate: ([\d., ]+), Avg",
        "Mean acceptance length: ",
        "v1/spec_decode/metrics.py",
    ),
    "engine_stats": _phrase(
        r"Running: (\d+) reqs, Waiting: (\d+) reqs",
        "Running: ",
        "v1/metrics/loggers.py",
        "Running: %d reqs",
    ),
    # uvicorn's words.
    "started": _phrase(r"Application startup complete", "Application startup complete", ""),
    "start_failed": _phrase(
        r"(Engine core initialization failed)",
        "Engine core initialization failed",
        "v1/engine/utils.py",
    ),
    "core_failed": _phrase(
        r"(EngineCore failed to start)\.", "EngineCore failed to start.", "v1/engine/core.py"
    ),
    # The last line of any traceback; read only where a start failed.
    "exception": _phrase(r"(?:^|[\s\]])((?:[\w.]+\.)?\w*Error): (.+)$", "Error: ", ""),
    "bench": _phrase(r"dataset_name='(\w+)'", "dataset_name='", ""),
    # This project's own lines (vllm_ling/status.py, vllm_ling/plugin.py).
    "ling_active": _phrase(r"vllm-ling: (\S+) active: (.*)$", " active: ", ""),
    "ling_inactive": _phrase(
        r"vllm-ling: inactive: (.*?)(?:; stock vLLM serves every model)?$", "vllm-ling: inactive: ", ""
    ),
    "ling_proof": _phrase(r"vllm-ling: PROOF ok: (\w+): (.*)$", "vllm-ling: PROOF ok: ", ""),
    "ling_fault": _phrase(r"vllm-ling: FAULT (\w+): (.*)$", "vllm-ling: FAULT ", ""),
    # "target path: KIND OF BATCH" is a choice too, and the kind is free text.
    "ling_choice": _phrase(r"vllm-ling: ([a-z][\w ]*?(?: path: .*?)?) = (\w+) \((.*)\)$", "vllm-ling: ", ""),
    "ling_decode_refused": _phrase(
        r"vllm-ling: ling\.decode=fused cannot be honoured \((.*)\); vLLM's layers decode$",
        "ling.decode=fused cannot be honoured",
        "",
    ),
    # An alarm of the guard of drafts, and its end.
    "ling_alarm": _phrase(
        r"vllm-ling: (?:ALARM (draft_\w+): (.*)|(draft_\w+): over: .*)$", "vllm-ling: ", "", ""
    ),
    "ling_error": _phrase(r"LingError: (.*)$", "LingError: ", ""),
}

# Prometheus series of vLLM that doctor reads (sample names), the same in every supported version.
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
RUNNING = "vllm:num_requests_running"
FINISHED = "vllm:request_success_total"
SLEEP_STATE = "vllm:engine_sleep_state"
CACHE_CONFIG = "vllm:cache_config_info"
COUNTERS = (DRAFTS, DRAFT_TOKENS, ACCEPTED, PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS)
SERIES = (*COUNTERS, ACCEPTED_PER_POSITION, RUNNING, FINISHED, SLEEP_STATE, CACHE_CONFIG)


def known_version(version: str) -> bool:
    """Whether the phrases are known to fit this vLLM version."""
    return version.startswith(tuple(f"{known}." for known in VERSIONS)) or version in VERSIONS
