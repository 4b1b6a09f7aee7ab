# SPDX-License-Identifier: Apache-2.0
"""One MoE layer of a checkpoint, tensor by tensor from its shards: the fp32 reference, and the plugin's torch path."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.layers import swiglu
from vllm_ling.reference.load import StoredTensors
from vllm_ling.reference.moe import Router

_SEED = 20260901
# Parameter suffix of the torch path -> suffix in the checkpoint.
_FIELDS = {
    "bf16": {"weight": "weight"},
    "fp8": {"weight": "weight", "weight_scale_inv": "weight_scale_inv"},
    "fp4": {"weight": "weight", "weight_scale": "weight_scale_inv"},
    "int4": {"weight_packed": "weight_packed", "weight_scale": "weight_scale"},
}
_STEMS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def sampled_layers(config: ReferenceConfig, count: int) -> list[int]:
    """Up to `count` MoE layers: the last decoder layer (clamped), the first, the MTP layer, then some between."""
    depth = config.num_hidden_layers
    routed = [i for i in range(depth + config.num_nextn_predict_layers) if config.is_moe(i)]
    decoder = [i for i in routed if i < depth]
    chosen = [*decoder[-1:], *decoder[:1], *[i for i in routed if i >= depth]]
    step = max(1, len(decoder) // max(1, count))
    chosen += decoder[step // 2 :: step]
    return sorted(list(dict.fromkeys(chosen))[:count])


class RealLayer:
    """The MoE block of layer `index`; only the experts that are asked for are read."""

    def __init__(self, stored: StoredTensors, config: ReferenceConfig, index: int) -> None:
        self.stored, self.config, self.index = stored, config, index
        self.prefix = f"model.layers.{index}"
        self.limit, self.shared_limit = config.limit(index, False), config.limit(index, True)

    def inputs(self, tokens: int) -> Tensor:
        """Seeded random inputs of the size that the layer's norm gives, exact in BF16: float32 [tokens, hidden]."""
        generator = torch.Generator().manual_seed(_SEED + self.index)
        x = torch.randn(tokens, self.config.hidden_size, generator=generator, dtype=torch.float32)
        normed = x * self.stored.weight(f"{self.prefix}.post_attention_layernorm.weight")
        return normed.bfloat16().float()

    def router(self) -> tuple[Tensor, Tensor]:
        """Gate float32 [experts, hidden] and selection bias float32 [experts]."""
        gate = self.stored.weight(f"{self.prefix}.mlp.gate.weight")
        return gate, self.stored.weight(f"{self.prefix}.mlp.gate.expert_bias")

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and expert ids int64, both [tokens, top_k]."""
        router = Router(self.config)
        gate, router.expert_bias = self.router()
        router.weight = nn.Parameter(gate, requires_grad=False)
        with torch.inference_mode():
            return router(x).topk(self.config.num_experts_per_tok, -1)

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The reference's weighted sum over the routed experts, float32 [tokens, hidden]."""
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            part = self._mlp(f"{self.prefix}.mlp.experts.{expert}", x[token], self.limit)
            out.index_add_(0, token, part * weights[token, slot, None])
        return out

    def shared(self, x: Tensor) -> Tensor:
        """The reference's shared expert, float32 [tokens, hidden]."""
        return self._mlp(f"{self.prefix}.mlp.shared_experts", x, self.shared_limit)

    def _mlp(self, module: str, x: Tensor, limit: float | None) -> Tensor:
        gate, up, down = (
            self.stored.weight(f"{module}.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        return F.linear(swiglu(F.linear(x, gate), F.linear(x, up), limit), down)

    def torch_path(
        self, fmt: str, x: Tensor, weights: Tensor, ids: Tensor, dtype: torch.dtype, at_load: bool
    ) -> Tensor:
        """The same through the plugin's `TorchMoEMethod`, which holds the experts that `ids` names, in `dtype`."""
        from vllm_ling.quant.moe_torch import TorchMoEMethod

        config, used = self.config, ids.unique().tolist()
        described: Any = SimpleNamespace(num_local_experts=config.num_experts)
        kind: Any = "mxfp4" if fmt == "fp4" else fmt
        method = TorchMoEMethod(described, kind, self.limit, dequantize_at_load=at_load)
        layer: Any = nn.Module()
        layer.expert_map = None
        sizes = (len(used), config.hidden_size, config.moe_intermediate_size)
        method.create_weights(layer, *sizes, dtype, weight_loader=None)
        for slot, expert in enumerate(used):
            for stem, projections in _STEMS.items():
                for suffix, name in _FIELDS[fmt].items():
                    parts = [self._field(expert, projection, name, fmt) for projection in projections]
                    getattr(layer, f"{stem}_{suffix}").data[slot].copy_(torch.cat(parts))
        method.process_weights_after_loading(layer)
        place = torch.zeros(config.num_experts, dtype=torch.long)
        place[torch.tensor(used)] = torch.arange(len(used))
        return method.apply(layer, x.to(dtype), weights, place[ids])

    def _field(self, expert: int, projection: str, name: str, fmt: str) -> Tensor:
        from vllm_ling.quant.expert_formats import e8m0_bytes

        tensor = self.stored.read(f"{self.prefix}.mlp.experts.{expert}.{projection}.{name}")
        if fmt == "fp4":
            return e8m0_bytes(tensor) if "scale" in name else tensor.view(torch.uint8)
        if fmt == "fp8" and "scale" in name:
            return (tensor.view(torch.float8_e8m0fnu) if tensor.dtype == torch.uint8 else tensor).float()
        return tensor
