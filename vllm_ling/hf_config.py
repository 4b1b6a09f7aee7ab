# SPDX-License-Identifier: Apache-2.0
"""Makes `model_type: bailing_hybrid` known to transformers, so that no checkpoint needs `--trust-remote-code`."""

MODEL_TYPE = "bailing_hybrid"


def register_hf_config() -> None:
    """Registers vLLM's own text config class for the model type; a second call changes nothing."""
    from transformers import AutoConfig
    from vllm.transformers_utils.configs.bailing_moe_v3_vl import BailingMoeV3TextConfig

    AutoConfig.register(MODEL_TYPE, BailingMoeV3TextConfig, exist_ok=True)
