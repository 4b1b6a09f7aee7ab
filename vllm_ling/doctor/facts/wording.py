# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM still writes the lines that doctor reads; else its silence is no evidence."""

import functools
import re

from vllm_ling.compat import installed_vllm
from vllm_ling.doctor.facts.known import vllm_folder
from vllm_ling.doctor.phrases import PHRASES

# Phrase -> facts that it states, also by its absence.
TELLS = {
    "moe_mxfp4": ("log.moe_backend", "log.moe_format"),
    "moe_fp8": ("log.moe_backend", "log.moe_format"),
    "moe_int4": ("log.moe_backend", "log.moe_format"),
    "moe_unquantized": ("log.moe_backend", "log.moe_format"),
    "moe_mxfp4_fallback": ("log.moe_activation_fallback",),
    "linear_kernel": ("log.linear_kernels",),
    "e8m0": ("log.e8m0",),
    "runner_v1": ("log.runner",),
    "graphs_off": ("log.graphs_off",),
    "kv_cache": ("log.kv_concurrency",),
    "prefix_off": ("log.prefix_off",),
    "unknown_variable": ("log.unknown_variables",),
    "compiled": ("log.compiled",),
    "cached": ("log.compiled", "log.compile_cached"),
    "draft_model": ("log.draft_loaded",),
    "asleep": ("log.slept_level_2",),
    "spec_metrics": ("recent.accept_length", "recent.per_position"),
    "engine_stats": ("recent.running",),
}
# A literal may be broken over lines of the source.
_BREAK = re.compile(r'"\s*\n\s*f?"')


@functools.cache
def vanished(version: str) -> dict[str, str]:
    """Phrases that a server of this version does not write, with the reason.

    Judged by the installed vLLM, so only for a server of its release; empty for others, whose phrases are in the table
    because their source held them.
    """
    release = ".".join(version.split(".")[:2])
    if release != ".".join((installed_vllm() or "").split(".")[:2]):
        return {}
    try:
        folder = vllm_folder()
    except OSError:
        return {}
    texts: dict[str, str] = {}
    gone = {}
    for name, phrase in PHRASES.items():
        file = phrase.source.get(release)
        if not file:
            continue
        if file not in texts:
            try:
                texts[file] = _BREAK.sub("", (folder / file).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                texts[file] = ""
        if phrase.literal not in texts[file]:
            gone[name] = f"the installed vLLM {release} no longer writes {phrase.literal!r} ({file})"
    return gone
