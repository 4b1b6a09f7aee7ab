# SPDX-License-Identifier: Apache-2.0
"""The registered quantization method `ling`: decides which checkpoints are ours; builds the real config lazily.

vLLM imports this file in every process, so it stays light; `config.py` with the layer methods is imported only once a
Ling checkpoint has been claimed.
"""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_ling.compat import ARCHITECTURE, MTP_ARCHITECTURE
from vllm_ling.errors import LingError

_FORMATS = ("fp8", "compressed-tensors")


class LingQuantConfig(QuantizationConfig):
    """Claims Ling checkpoints. An instance itself serves BF16 weights (`--quantization ling`)."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Returns "ling" for a quantized Ling checkpoint, None for everything else.

        Raises:
            LingError: if `--quantization` names another method for a Ling checkpoint.
        """
        architectures = getattr(hf_config, "architectures", None) or []
        if not {ARCHITECTURE, MTP_ARCHITECTURE}.intersection(architectures):
            return None
        stored = hf_quant_cfg.get("quant_method")
        if stored not in _FORMATS:
            return None
        if user_quant not in (None, "ling"):
            raise LingError(
                f"--quantization {user_quant}: this Ling checkpoint carries its own quantization_config "
                f"(quant_method {stored!r}); leave the option out, or set VLLM_LING_DISABLE=1 for stock vLLM"
            )
        return "ling"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Builds the config that fits the checkpoint's own format."""
        from vllm_ling.quant.config import config_for

        return config_for(config)

    @classmethod
    def get_name(cls) -> Any:
        return "ling"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Method for one layer of a BF16 checkpoint; see `config.bf16_method`."""
        from vllm_ling.quant.config import bf16_method

        return bf16_method(layer, prefix)
