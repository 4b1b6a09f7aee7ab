# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: registers the parts of vllm-ling with vLLM.

vLLM calls `register()` in every process, for every model. It must therefore be cheap, must never raise (an exception
here would stop vLLM for unrelated models too) and must leave the process untouched when it cannot do its job.
"""

import os

from vllm_ling import __version__, compat
from vllm_ling.status import STATUS, info, warning


def register() -> None:
    """Registers everything once per process and records the outcome in `status.STATUS`; never raises."""
    if STATUS.state != "not registered":
        return
    if os.environ.get("VLLM_LING_DISABLE") == "1":
        _inactive("VLLM_LING_DISABLE=1")
        info("inactive: VLLM_LING_DISABLE=1; stock vLLM serves every model")
        return
    try:
        reason = compat.check_window(compat.installed_vllm())
        if reason is None:
            _register_parts()
    except Exception as error:  # recorded, and vLLM goes on without us
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _inactive(reason)
        warning(f"inactive: {reason}; stock vLLM serves every model")
        return
    STATUS.state = "active"
    info(f"{__version__} active: {'; '.join(f'{part} ({what})' for part, what in STATUS.active.items())}")


def _inactive(reason: str) -> None:
    STATUS.state, STATUS.reason = "inactive", reason
    STATUS.inactive.update({part: reason for part in ("config", "models", "quantization", "config hook")})
    STATUS.active.clear()


def _register_parts() -> None:
    # Resolve everything that can fail before changing anything, so that a failure leaves stock vLLM behind.
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from vllm_ling.hf_config import MODEL_TYPE, register_hf_config
    from vllm_ling.models.config_hook import LingConfigHook
    from vllm_ling.quant.claim import LingQuantConfig

    register_hf_config()
    STATUS.active["config"] = f"model_type {MODEL_TYPE}"
    register_quantization_config("ling")(LingQuantConfig)
    STATUS.active["quantization"] = "ling"
    # Lazy "module:Class" strings: torch-heavy model code is imported only when a Ling model is served.
    ModelRegistry.register_model(compat.ARCHITECTURE, "vllm_ling.models.ling:LingForCausalLM")
    ModelRegistry.register_model(compat.MTP_ARCHITECTURE, "vllm_ling.spec_decode.mtp:LingMTPModel")
    STATUS.active["models"] = f"{compat.ARCHITECTURE}, {compat.MTP_ARCHITECTURE}"
    MODELS_CONFIG_MAP[compat.ARCHITECTURE] = LingConfigHook
    STATUS.active["config hook"] = compat.ARCHITECTURE
