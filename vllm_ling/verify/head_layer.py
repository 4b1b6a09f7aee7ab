# SPDX-License-Identifier: Apache-2.0
"""The output head of a checkpoint: as it is stored, and as the plugin would serve it in FP8."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch

from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.row_fp8 import quantize_row_fp8
from vllm_ling.reference.load import StoredTensors

NAME = "lm_head.weight"
_ROWS = 4096  # a multiple of the 128 rows that share a block scale
Source = Literal["fp8_online", "fp8_row", "fp8_block"]


def head_source(stored: StoredTensors) -> Source:
    """Where the FP8 head comes from: quantized while loading, or stored with row or block scales."""
    if stored.read(NAME).dtype != torch.float8_e4m3fn:
        return "fp8_online"
    return "fp8_row" if f"{NAME}_scale" in stored.files else "fp8_block"


def stored_rows(stored: StoredTensors) -> Iterator[tuple[slice, torch.Tensor]]:
    """The stored head row range by row range, dequantized: float32 [rows, hidden]."""
    weight, source = stored.read(NAME), head_source(stored)
    scale = None if source == "fp8_online" else stored.read(f"{NAME}_{_SCALE[source]}")
    for begin in range(0, weight.shape[0], _ROWS):
        part = slice(begin, min(begin + _ROWS, weight.shape[0]))
        rows = weight[part]
        if scale is None:
            yield part, rows.float()
        elif source == "fp8_row":
            yield part, rows.float() * scale.flatten()[part, None]
        else:
            yield part, dequantize_block_fp8(rows, scale[begin // 128 : -(-part.stop // 128)])


def fp8_rows(stored: StoredTensors) -> Iterator[tuple[slice, torch.Tensor]]:
    """The same of the FP8 head that the plugin serves: the stored one, or the BF16 one quantized."""
    online = head_source(stored) == "fp8_online"
    for part, rows in stored_rows(stored):
        if online:
            codes, scale = quantize_row_fp8(rows)
            rows = codes.float() * scale[:, None]
        yield part, rows


def head_method(stored: StoredTensors, device: torch.device) -> tuple[Any, Any]:
    """The plugin's own head method and the layer that it has loaded, on `device`."""
    from vllm_ling.quant.head_fp8 import HeadFp8Method

    weight, source = stored.read(NAME), head_source(stored)
    rows, hidden = weight.shape
    method = HeadFp8Method(source, "fail", dummy=False)
    layer: Any = torch.nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=rows)
    with device:
        method.create_weights(layer, hidden, [rows], hidden, rows, torch.bfloat16, weight_loader=None)
    if source == "fp8_online":
        layer.weight.weight_loader(layer.weight, weight)
    else:
        layer.weight.data.copy_(weight)
        scale: Any = method.scale(layer)
        scale.weight_loader(scale, stored.read(f"{NAME}_{_SCALE[source]}"))
    method.process_weights_after_loading(layer)
    return method, layer


_SCALE = {"fp8_row": "scale", "fp8_block": "scale_inv"}
