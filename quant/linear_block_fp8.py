# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 linear layers on the CPU: loaded as stored, dequantized once, computed in the model dtype.

vLLM's CPU block-FP8 kernel needs AMX tiles; this path runs on any CPU in BF16 and FP32. It trades memory for reach:
the FP8 bytes are dropped after dequantization, so the layer takes 2 or 4 bytes a weight instead of 1.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter
from vllm.model_executor.utils import replace_parameter

from vllm_ling.quant.block_fp8 import dequantize_block_fp8


class BlockFp8CpuMethod(UnquantizedLinearMethod):
    """After loading the layer holds a plain weight, hence the base class."""

    def __init__(self, block: list[int] | None, scale_is_e8m0: bool) -> None:
        super().__init__()
        if block is None:
            raise ValueError("Ling FP8 checkpoints quantize weights in blocks; weight_block_size is missing")
        self._block = (int(block[0]), int(block[1]))
        self._scale_dtype = torch.float8_e8m0fnu if scale_is_e8m0 else torch.float32

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers `weight` (e4m3, [out, in]) and `weight_scale_inv` ([out / 128, in / 128])."""
        loader = extra_weight_attrs.get("weight_loader")
        layer.logical_widths = output_partition_sizes
        layer.orig_dtype = params_dtype
        layer.weight_block_size = list(self._block)
        validate_fp8_block_shape(
            layer,
            input_size,
            output_size,
            input_size_per_partition,
            output_partition_sizes,
            layer.weight_block_size,
        )
        rows = sum(output_partition_sizes)
        layer.register_parameter(
            "weight", create_fp8_weight_parameter(rows, input_size_per_partition, loader)
        )
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter,
            output_partition_sizes,
            input_size_per_partition,
            layer.weight_block_size,
            loader,
            scale_dtype=self._scale_dtype,
        )
        layer.register_parameter("weight_scale_inv", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        dense = dequantize_block_fp8(layer.weight, layer.weight_scale_inv, self._block, layer.orig_dtype)
        replace_parameter(layer, "weight", dense)
        del layer.weight_scale_inv
        super().process_weights_after_loading(layer)
