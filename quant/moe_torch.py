# SPDX-License-Identifier: Apache-2.0
"""Routed experts in plain torch, for every checkpoint format: the CPU path, and the reference on any device.

Two modes from the same bytes. `reference` keeps the stored form and dequantizes the experts that a batch needs
at every call. `torch` dequantizes once after loading and drops the stored form, so one (wider) copy remains.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from vllm_ling.quant.expert_formats import FIELDS, dequantize_expert, e8m0_bytes
from vllm_ling.quant.moe_policy import ExpertFormat

# Up to this many experts, computing all of them in two large GEMMs beats visiting each routed one.
_DENSE_EXPERTS = 32
_DENSE_TOKENS = 64


class TorchMoEMethod(FusedMoEMethodBase):
    """Fused-MoE method for `RoutedExperts`.

    Args:
        moe: vLLM's description of the layer.
        fmt: how the checkpoint stores the experts.
        limit: SwiGLU clamp in the trained form, or None.
        dequantize_at_load: the `torch` mode; otherwise `reference`.
    """

    def __init__(
        self, moe: FusedMoEConfig, fmt: ExpertFormat, limit: float | None, dequantize_at_load: bool
    ) -> None:
        super().__init__(moe)
        self._fmt = fmt
        self._limit = limit
        self._dequantize_at_load = dequantize_at_load
        # w2 is kept as [experts * intermediate, hidden], so that all experts are one GEMM.
        self._flat = dequantize_at_load and moe.num_local_experts <= _DENSE_EXPERTS

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the stored fields of w13 ([experts, 2 * intermediate, hidden]) and w2, as vLLM's loader expects."""
        self._dtype = params_dtype
        shapes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for stem, (rows, cols) in shapes.items():
            for field in FIELDS[self._fmt]:
                shape = (num_experts, -(-rows // field.rows), -(-cols // field.cols))
                param: Any = Parameter(
                    torch.zeros(shape, dtype=field.dtype or params_dtype), requires_grad=False
                )
                set_weight_attrs(param, extra_weight_attrs)
                if field.scale_kind is not None:
                    param.quant_method = field.scale_kind
                if field.source_dtypes:
                    param.ling_source_dtypes = field.source_dtypes
                if self._fmt == "mxfp4" and field.scale_kind is not None:
                    param.weight_loader = _loads_e8m0(extra_weight_attrs["weight_loader"])
                layer.register_parameter(f"{stem}_{field.suffix}", param)
            if self._fmt == "int4":
                shape_param: Any = Parameter(
                    torch.zeros(num_experts, 2, dtype=torch.int64), requires_grad=False
                )
                set_weight_attrs(shape_param, extra_weight_attrs)
                shape_param.ling_source_dtypes = (torch.int64, torch.int32)
                layer.register_parameter(f"{stem}_weight_shape", shape_param)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self._dequantize_at_load:
            return
        for stem in ("w13", "w2"):
            dense = self._dequantize(layer, stem, slice(None))
            for name in [n for n in layer._parameters if n.startswith(f"{stem}_")]:
                delattr(layer, name)
            layer.register_parameter(f"{stem}_weight", Parameter(dense, requires_grad=False))
        if self._flat:
            flat = layer.w2_weight.transpose(1, 2).flatten(0, 1).contiguous()
            layer.w2_weight = Parameter(flat, requires_grad=False)

    def _dequantize(self, layer: Any, stem: str, index: Any) -> torch.Tensor:
        fields = {f.suffix: getattr(layer, f"{stem}_{f.suffix}")[index] for f in FIELDS[self._fmt]}
        if self._fmt == "fp8" and isinstance(index, slice):
            return torch.stack(
                [
                    dequantize_expert(self._fmt, {k: v[e] for k, v in fields.items()}, self._dtype)
                    for e in range(fields["weight"].shape[0])
                ]
            )
        return dequantize_expert(self._fmt, fields, self._dtype)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weighted sum over the routed experts.

        Args:
            x: [tokens, hidden].
            topk_weights, topk_ids: [tokens, top_k]; ids are global, an id outside this rank's map contributes nothing.

        Returns:
            [tokens, hidden] in x's dtype; the caller adds shared experts.
        """
        ids = topk_ids.long()
        weights = topk_weights.float()
        if layer.expert_map is not None:
            ids = layer.expert_map[ids].long()
        weights = weights.masked_fill(ids < 0, 0)
        ids = ids.clamp_min(0)
        if self._flat and x.shape[0] <= _DENSE_TOKENS:
            return self._all_experts(layer, x, weights, ids)
        return self._routed_experts(layer, x, weights, ids)

    def _all_experts(
        self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        experts, rows, hidden = layer.w13_weight.shape
        gate_up = F.linear(x, layer.w13_weight.view(experts * rows, hidden)).view(-1, experts, rows)
        share = torch.zeros(x.shape[0], experts, dtype=torch.float32, device=x.device).scatter_add_(
            1, ids, weights
        )
        gated = self._swiglu(gate_up) * share.to(x.dtype)[..., None]
        return gated.flatten(1) @ layer.w2_weight

    def _routed_experts(
        self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = self._expert(layer, expert)
            partial = F.linear(self._swiglu(F.linear(x[token], w13)), w2)
            out.index_add_(0, token, partial.float() * weights[token, slot, None])
        return out.to(x.dtype)

    def _expert(self, layer: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._dequantize_at_load:
            return self._dequantize(layer, "w13", expert), self._dequantize(layer, "w2", expert)
        w13 = layer.w13_weight[expert]
        if not self._flat:
            return w13, layer.w2_weight[expert]
        half = w13.shape[0] // 2
        return w13, layer.w2_weight[expert * half : (expert + 1) * half].T

    def _swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self._limit is None:
            return F.silu(gate) * up
        return F.silu(gate).clamp(max=self._limit) * up.clamp(-self._limit, self._limit)


def _loads_e8m0(loader: Any) -> Any:
    def load(param: Parameter, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return loader(param, e8m0_bytes(loaded), *args, **kwargs)

    return load
