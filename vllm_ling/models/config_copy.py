# SPDX-License-Identifier: Apache-2.0
"""Gives BF16 checkpoints the `ling` layer methods (for their SwiGLU clamps) without changing the user's config."""

import copy

from vllm.config import VllmConfig

from vllm_ling.quant.claim import LingQuantConfig


def with_ling_quantization(vllm_config: VllmConfig) -> VllmConfig:
    """The same config, or a shallow copy whose quant_config is ours if there was none."""
    if vllm_config.quant_config is not None:
        return vllm_config
    vllm_config = copy.copy(vllm_config)
    vllm_config.quant_config = LingQuantConfig()
    return vllm_config
