# SPDX-License-Identifier: Apache-2.0
"""The serve settings that checks read, from what the user typed: a command line, or the log's list of arguments.

A setting that was not given has vLLM's default, which is a fact too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ling.doctor.facts.drafts import draft_tokens
from vllm_ling.doctor.facts.flags import read_flags
from vllm_ling.doctor.facts.store import Facts

# Setting -> vLLM's default where it does not depend on model or machine.
_DEFAULTS: dict[str, Any] = {
    "enforce_eager": False,
    "moe_backend": "auto",
    "max_num_seqs": None,
    "max_model_len": None,
    "enable_prefix_caching": None,
    "gpu_memory_utilization": None,
    "quantization": None,
    "reasoning_parser": None,
    "tool_call_parser": None,
    "chat_template": None,
    "tensor_parallel_size": 1,
    "load_format": "auto",
    "model_impl": "auto",
    "dtype": "auto",
    "cudagraph_capture_sizes": None,
    "disable_log_stats": False,
    "optimization_level": None,
}


def put_command(facts: Facts, words: Sequence[str]) -> str | None:
    """States `serve.*` facts from a serve command's words; returns the model that they name."""
    facts.sources.add("static")
    flags = read_flags(words)
    facts.put("serve.flags", flags.names, "command line")
    facts.put("serve.flag_problems", flags.problems, "command line")
    put_settings(facts, flags.given, "command line")
    model = flags.given.get("model_tag") or flags.given.get("model")
    return None if model is None else str(model)


def put_settings(facts: Facts, given: Mapping[str, Any], origin: str) -> None:
    """States `serve.*` facts from arguments as vLLM names them."""
    for name, default in _DEFAULTS.items():
        facts.put(f"serve.{name}", given.get(name, default), origin)
    kernel = given.get("kernel_config")
    if isinstance(kernel, Mapping) and "moe_backend" in kernel:
        facts.put("serve.moe_backend_nested", kernel["moe_backend"], origin)
    speculative = given.get("speculative_config")
    if isinstance(speculative, Mapping):
        facts.put("serve.speculative", dict(speculative), origin)
        facts.put("serve.method", speculative.get("method"), origin)
        try:
            facts.put("serve.k", draft_tokens(speculative.get("num_speculative_tokens", 1)), origin)
        except ValueError as error:
            facts.lacks("serve.k", f"{origin}: num_speculative_tokens: {error}")
        facts.put("serve.draft_head_quantization", speculative.get("draft_lm_head_quantization"), origin)
    else:
        facts.put("serve.speculative", None, origin)
        facts.put("serve.method", None, origin)
        facts.put("serve.k", 0, origin)
        facts.put("serve.draft_head_quantization", None, origin)
    overrides = given.get("hf_overrides")
    overrides = overrides if isinstance(overrides, Mapping) else {}
    facts.put("serve.head_dtype", overrides.get("head_dtype"), origin)
    facts.put("serve.architectures", overrides.get("architectures"), origin)
    additional = given.get("additional_config")
    ling = additional.get("ling", {}) if isinstance(additional, Mapping) else {}
    facts.put("serve.ling", ling, origin)
    compilation = given.get("compilation_config")
    if isinstance(compilation, Mapping):
        if "cudagraph_capture_sizes" in compilation:
            facts.put("serve.capture_sizes", compilation["cudagraph_capture_sizes"], origin)
        if "cudagraph_mode" in compilation:
            facts.put("serve.cudagraph_mode", str(compilation["cudagraph_mode"]).upper(), origin)
    if given.get("cudagraph_capture_sizes"):
        facts.put("serve.capture_sizes", given["cudagraph_capture_sizes"], origin)
    model = given.get("model_tag") or given.get("model")
    if model:
        facts.put("serve.model", str(model), origin)
