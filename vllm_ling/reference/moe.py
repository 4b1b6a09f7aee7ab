# SPDX-License-Identifier: Apache-2.0
"""Ling's mixture of experts: grouped sigmoid routing with a selection bias, routed and shared experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.layers import MLP, linear, swiglu


class Router(nn.Module):
    """The gate projection [experts, hidden] with its selection bias [experts], both used in float32."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = linear(config.hidden_size, config.num_experts).weight
        self.expert_bias: Tensor
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] -> weights [N, experts] float32, zero for experts that were not chosen.

        The bias takes part in the choice only. A group's score is the sum of its two best biased scores;
        experts are chosen inside the best `topk_group` groups; weights are unbiased, renormalized and scaled.
        """
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        biased = scores.detach() + self.expert_bias
        groups = biased.unflatten(-1, (config.n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        chosen = groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = chosen.topk(config.num_experts_per_tok, dim=-1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / picked.sum(-1, keepdim=True) * config.routed_scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, picked)


class Experts(nn.Module):
    """Stacked weights: gate_proj, up_proj [E, intermediate, hidden]; down_proj [E, hidden, intermediate]."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, x: Tensor, weights: Tensor, limit: float | None) -> Tensor:
        """Only the routed experts run. x [N, hidden], weights [N, E] -> [N, hidden] float32."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in weights.sum(0).nonzero().flatten().tolist():
            rows = weights[:, expert].nonzero().flatten()
            part = x[rows]
            inner = swiglu(
                F.linear(part, self.gate_proj[expert]), F.linear(part, self.up_proj[expert]), limit
            )
            out[rows] += weights[rows, expert, None] * F.linear(inner, self.down_proj[expert]).float()
        return out

    def forward_dense(self, x: Tensor, weights: Tensor, limit: float | None) -> Tensor:
        """The same sum as three matrix products over all experts, for few small experts."""
        gate, up = F.linear(x, self.gate_proj.flatten(0, 1)), F.linear(x, self.up_proj.flatten(0, 1))
        inner = swiglu(gate, up, limit).unflatten(-1, (*weights.shape[1:], -1))
        scaled = (inner * weights.unsqueeze(-1).to(inner.dtype)).flatten(-2)
        return F.linear(scaled, self.down_proj.movedim(0, 1).flatten(1)).float()


class MoE(nn.Module):
    """Routed and shared experts. `dense` picks the form; training counts tokens per expert in `load`."""

    dense = False

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        super().__init__()
        self.limit = config.limit(layer, shared=False)
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(
            config.hidden_size, config.shared_intermediate_size, config.limit(layer, shared=True)
        )
        self.dropped: int | None = None
        self.load: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; tokens where `mask` [B, T] is False are left out of `load`."""
        flat = x.flatten(0, -2)
        weights = self.gate(flat)
        if self.training:
            counted = weights.detach() > 0
            if mask is not None:
                counted = counted & mask.reshape(-1, 1)
            self.load = counted.float().sum(0)
        if self.dropped is not None:
            weights = weights.index_fill(1, torch.tensor([self.dropped], device=x.device), 0.0)
        run = self.experts.forward_dense if self.dense else self.experts.forward
        shared: Tensor = self.shared_experts(x)
        return run(flat, weights, self.limit).view_as(x) + shared
