# SPDX-License-Identifier: Apache-2.0
"""Puts the CPU layers and backends in place, through vLLM's own registries."""

_installed: list[str] = []


def install_cpu_layers() -> list[str]:
    """Registers everything once per process; does nothing on other platforms.

    Called only when a Ling model is being served, so no other model meets the replacements.

    Returns:
        What is active in this process, one entry per replaced class.
    """
    from vllm.platforms import current_platform

    if _installed or not current_platform.is_cpu():
        return list(_installed)
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )

    from vllm_ling.cpu.attention import CpuKdaBackend, CpuMlaBackend
    from vllm_ling.cpu.kda import CpuKimiDeltaAttention
    from vllm_ling.cpu.norm import CpuRMSNorm
    from vllm_ling.cpu.rotary import CpuRotaryEmbedding
    from vllm_ling.cpu.sampling import install as install_sampling

    register_backend(AttentionBackendEnum.CPU_MLA)(CpuMlaBackend)
    register_backend(MambaAttentionBackendEnum.GDN_ATTN, is_mamba=True)(CpuKdaBackend)
    BailingMoeV3KimiDeltaAttention.register_oot(CpuKimiDeltaAttention)
    RotaryEmbedding.register_oot(CpuRotaryEmbedding)
    RMSNorm.register_oot(CpuRMSNorm)
    install_sampling()
    _installed.extend(["CPU_MLA", "GDN_ATTN", "BailingMoeV3KimiDeltaAttention", "RotaryEmbedding", "RMSNorm"])
    _installed.append("expand_batch_to_tokens")
    return list(_installed)
