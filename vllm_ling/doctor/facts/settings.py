# SPDX-License-Identifier: Apache-2.0
"""The serve settings that checks read, from what the user typed: a command line, or the log's list of arguments.

A setting that was not given has vLLM's default, which is a fact too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ling.doctor.facts.drafts import draft_tokens
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
}
_SHORT = {
    "-q": "quantization",
    "-tp": "tensor_parallel_size",
    "-O": "optimization_level",
    "-cc": "compilation_config",
}
_SWITCHES = {
    "enforce_eager",
    "enable_prefix_caching",
    "enable_auto_tool_choice",
    "trust_remote_code",
    "disable_log_stats",
}


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, switches, `--no-name` and dotted names of a serve command as a mapping.

    Values that read as JSON become what they say; everything else stays text.
    """
    given: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-") or re.fullmatch(r"-\d.*", word):
            given.setdefault("model", word)
            continue
        name, separator, text = word.partition("=")
        name = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
        if not separator:
            following = words[index] if index < len(words) else None
            if name.removeprefix("no_") in _SWITCHES or following is None or following.startswith("--"):
                _set(given, name.removeprefix("no_"), not name.startswith("no_"))
                continue
            text, index = following, index + 1
        _set(given, name, _value(text))
    return given


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _set(given: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    place = given
    for part in path:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        place = inner
    place[last] = value


def put_settings(facts: Facts, given: Mapping[str, Any], origin: str) -> None:
    """States `serve.*` facts from arguments as vLLM names them."""
    for name, default in _DEFAULTS.items():
        facts.put(f"serve.{name}", given.get(name, default), origin)
    kernel = given.get("kernel_config")
    if isinstance(kernel, Mapping) and "moe_backend" in kernel:
        facts.put("serve.moe_backend_nested", kernel["moe_backend"], origin)
    speculative = given.get("speculative_config")
    if isinstance(speculative, Mapping):
        facts.put("serve.method", str(speculative.get("method", "mtp")), origin)
        try:
            facts.put("serve.k", draft_tokens(speculative.get("num_speculative_tokens", 1)), origin)
        except ValueError as error:
            facts.lacks("serve.k", f"{origin}: num_speculative_tokens: {error}")
        facts.put("serve.draft_head_quantization", speculative.get("draft_lm_head_quantization"), origin)
    else:
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
