# SPDX-License-Identifier: Apache-2.0
"""Puts the CPU implementations in place, once per process, and only where a Ling model is served on the CPU."""

from vllm.platforms import current_platform

_installed: list[str] = []


def install_cpu_layers() -> list[str]:
    """Registers the CPU layers and backends; returns what is active (empty on other devices)."""
    if _installed or not current_platform.is_cpu():
        return _installed
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )

    from vllm_ling.cpu.kda import CpuKimiDeltaAttention
    from vllm_ling.cpu.rotary import NativeRotaryEmbedding

    BailingMoeV3KimiDeltaAttention.register_oot(CpuKimiDeltaAttention, name="BailingMoeV3KimiDeltaAttention")
    RotaryEmbedding.register_oot(NativeRotaryEmbedding, name="RotaryEmbedding")
    register_backend(AttentionBackendEnum.CPU_MLA, "vllm_ling.cpu.attention.HybridCpuMLABackend")
    register_backend(
        MambaAttentionBackendEnum.GDN_ATTN, "vllm_ling.cpu.attention.FreshRowsGDNBackend", is_mamba=True
    )
    _installed.extend(["KDA in torch", "rotary in torch", "CPU_MLA block sizes", "GDN fresh rows"])
    return _installed
