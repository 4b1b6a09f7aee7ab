# SPDX-License-Identifier: Apache-2.0
"""Which method serves which layer: the checkpoint's own config, with our head and our CPU paths laid over it.

Three checkpoint families: block FP8 (with FP8 or MXFP4 experts), compressed-tensors (INT4 experts) and BF16. What a
GPU already serves well in stock vLLM (block-FP8 and INT4 linears, Marlin and Humming experts) stays stock.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from vllm_ling.quant.claim import LingQuantConfig
from vllm_ling.quant.head import head_method, linear_choice
from vllm_ling.quant.linear_block_fp8 import BlockFp8CpuMethod
from vllm_ling.quant.moe import moe_method
from vllm_ling.quant.moe_policy import ExpertFormat


class LingFp8Config(Fp8Config):
    """Block-FP8 checkpoints, with FP8 or MXFP4 routed experts."""

    get_name = LingQuantConfig.get_name
    get_supported_act_dtypes = LingQuantConfig.get_supported_act_dtypes

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, ParallelLMHead):
            return head_method(layer, prefix, get_current_vllm_config())
        if isinstance(layer, RoutedExperts):
            fmt: ExpertFormat = "mxfp4" if self.store_dtype == "mxfp4" else "fp8"
            return moe_method(
                layer, fmt, stock=lambda: super(LingFp8Config, self).get_quant_method(layer, prefix)
            )
        if isinstance(layer, LinearBase) and current_platform.is_cpu():
            if self._skips(prefix):
                return UnquantizedLinearMethod()
            return BlockFp8CpuMethod(self.weight_block_size, getattr(self, "is_scale_e8m0", False))
        method = super().get_quant_method(layer, prefix)
        if isinstance(layer, LinearBase) and linear_choice(get_current_vllm_config())[0] == "ling":
            from vllm_ling.quant.linear_decode import with_decode_kernel

            return with_decode_kernel(method, self)
        return method

    def _skips(self, prefix: str) -> bool:
        return is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        )


class LingInt4Config(CompressedTensorsConfig):
    """compressed-tensors checkpoints: INT4 routed experts, everything else BF16."""

    get_name = LingQuantConfig.get_name
    get_supported_act_dtypes = LingQuantConfig.get_supported_act_dtypes

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, ParallelLMHead):
            return head_method(layer, prefix, get_current_vllm_config())
        if isinstance(layer, RoutedExperts):
            return moe_method(
                layer, "int4", stock=lambda: super(LingInt4Config, self).get_quant_method(layer, prefix)
            )
        return super().get_quant_method(layer, prefix)


def config_for(config: dict[str, Any]) -> QuantizationConfig:
    """The composed config for a checkpoint's `quantization_config` section."""
    cls = LingInt4Config if config.get("quant_method") == "compressed-tensors" else LingFp8Config
    return cls.from_config(config)


def bf16_method(layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
    """Method for one layer of a BF16 checkpoint served with `--quantization ling`."""
    if isinstance(layer, ParallelLMHead):
        return head_method(layer, prefix, get_current_vllm_config())
    if isinstance(layer, RoutedExperts):
        return moe_method(layer, "bf16", stock=lambda: None)
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
