# SPDX-License-Identifier: Apache-2.0
"""Draft heads broken on purpose, for the demo and the tests: what a draft sees that shares bytes and not the module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class _PlainHeadMethod(QuantizeMethodBase):
    """Logits from the weight alone, as an unquantized head computes them."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a broken head is derived from a loaded one, never loaded")

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = F.linear(x, layer.weight.to(x.dtype)).nan_to_num(0.0)
        # FP8 storage read as BF16 has half as many rows; the missing ones must still exist as logits.
        return F.pad(logits, (0, layer.rows - logits.shape[-1]), value=-1e30)


class BrokenHead(nn.Module):
    """A head with the interface vLLM's logits processor uses, and the wrong numbers."""

    def __init__(self, target: Any, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = Parameter(weight, requires_grad=False)
        self.rows = target.weight.shape[0]
        self.embedding_dim = target.embedding_dim
        self.tp_size = target.tp_size
        self.shard_indices = target.shard_indices
        self.quant_method = _PlainHeadMethod()


def broken_head(target: Any, kind: str) -> BrokenHead:
    """Derives a broken head from the target's FP8 head.

    Args:
        kind: "head_bytes" reads the FP8 storage as BF16 (the study's failure); "head_scale" casts FP8 values to BF16
            and forgets the row scales.
    """
    fp8 = target.weight.data.contiguous()
    if kind == "head_scale":
        return BrokenHead(target, fp8.to(torch.bfloat16))
    hidden = fp8.shape[1]
    return BrokenHead(
        target, fp8.view(torch.uint8).reshape(-1).view(torch.bfloat16).reshape(-1, hidden).clone()
    )
