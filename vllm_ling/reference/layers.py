# SPDX-License-Identifier: Apache-2.0
"""The blocks of a Ling decoder in plain torch: norms, SwiGLU, KDA layer, MLA layer, grouped MoE.

Parameter names and shapes are the official checkpoint's, except that routed experts are stacked on a first
axis. Formulas were read off vLLM's `bailing_moe_v3` and the KDA paper; nothing is imported from either.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_ling.reference.cache import KdaState, MlaState
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.kda import kda_chunked, kda_gate, kda_recurrent, l2_normalize


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32, over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A bias-free projection; its weight is [outputs, inputs]."""
    return nn.Linear(inputs, outputs, bias=False)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up; a limit L clamps silu(gate) from above and up to [-L, L], as Ling is trained."""
    gate = F.silu(gate)
    if limit is None:
        return gate * up
    return gate.clamp(max=limit) * up.clamp(-limit, limit)


class MLP(nn.Module):
    """A dense or shared-expert SwiGLU block."""

    def __init__(self, hidden: int, intermediate: int, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.limit))
        return out


class ShortConv(nn.Module):
    """Holder of one depthwise causal convolution kernel [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class KdaAttention(nn.Module):
    """One KDA layer. `chunked` picks the parallel form for more than one token, the recurrence otherwise."""

    chunked = False

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.lower_bound, self.taps = config.kda_lower_bound, config.short_conv_kernel_size
        hidden, width = config.hidden_size, self.heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        self.f_proj, self.g_proj, self.b_proj = (linear(hidden, n) for n in (width, width, self.heads))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(width, self.taps) for _ in range(3))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = linear(width, hidden)

    def new_state(self, x: Tensor) -> KdaState:
        """The all-zero state for the batch of `x`."""
        batch, width = x.shape[0], self.heads * self.head_dim
        conv = torch.zeros(batch, self.taps - 1, 3 * width, device=x.device)
        return KdaState(conv, torch.zeros(batch, self.heads, self.head_dim, self.head_dim, device=x.device))

    def forward(self, x: Tensor, state: KdaState | None, mask: Tensor | None) -> Tensor:
        """x [B, T, hidden] -> the same; advances `state` in place; `mask` [B, T] is False at padding."""
        state = state or self.new_state(x)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1).float()
        beta = self.b_proj(x).float().sigmoid()
        decay = kda_gate(self.f_proj(x), self.A_log, self.dt_bias, self.lower_bound)
        if mask is not None:
            qkv, beta = qkv * mask[..., None], beta * mask[..., None]
            decay = decay * mask[..., None, None]
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        kernel = torch.cat([conv.weight for conv in convs]).squeeze(1).float()
        padded = torch.cat([state.conv, qkv], dim=1)
        state.conv = padded[:, -(self.taps - 1) :]
        tokens = x.shape[1]
        mixed = F.silu(
            torch.stack([padded[:, i : i + tokens] * kernel[:, i] for i in range(self.taps)]).sum(0)
        )
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)) for t in mixed.chunk(3, dim=-1))
        core = kda_chunked if self.chunked and tokens > 1 else kda_recurrent
        with torch.autocast(x.device.type, enabled=False):
            q, k = l2_normalize(q) * self.head_dim**-0.5, l2_normalize(k)
            out, state.memory = core(q, k, v, decay, beta, state.memory)
        gate = self.g_proj(x).float().unflatten(-1, (self.heads, self.head_dim)).sigmoid()
        result: Tensor = self.o_proj((self.o_norm(out) * gate).flatten(-2))
        return result


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding on interleaved pairs (2i, 2i+1). x: [B, T, H, R]; positions: [B, T]."""
    half = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32)
    angles = (positions.float()[..., None] * theta ** (-half / x.shape[-1])).unsqueeze(2)
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class MlaAttention(nn.Module):
    """Multi-head latent attention with expanded keys and values; optional gate per head or element."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        heads, hidden, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        self.nope, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        query_dim = self.nope + config.qk_rope_head_dim
        self.scale = query_dim**-0.5
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * query_dim)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = linear(config.q_lora_rank, heads * query_dim)
        self.kv_a_proj_with_mqa = linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (self.nope + self.value_dim))
        if config.mla_gate is not None:
            per_head = 1 if config.mla_gate == "head_wise" else self.value_dim
            self.g_proj = linear(hidden, heads * per_head)
        self.dense = linear(heads * self.value_dim, hidden)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries, keys [B, T, H, nope + rope] and values [B, T, H, v] in float32."""
        heads, theta = self.config.num_attention_heads, self.config.rope_theta
        low_rank = self.config.q_lora_rank is not None
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low_rank else self.q_proj(x)
        q_nope, q_rope = q.float().unflatten(-1, (heads, -1)).tensor_split([self.nope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).tensor_split([self.config.kv_lora_rank], dim=-1)
        expanded: Tensor = self.kv_b_proj(self.kv_a_layernorm(latent)).float().unflatten(-1, (heads, -1))
        k_nope, v = expanded.tensor_split([self.nope], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), positions, theta).expand(-1, -1, heads, -1)
        q = torch.cat([q_nope, rotate(q_rope, positions, theta)], dim=-1) * self.scale
        return q, torch.cat([k_nope, k_rope], dim=-1), v

    def output(self, attended: Tensor, x: Tensor) -> Tensor:
        """Gates the heads' results [B, T, H, v] by x and projects them to [B, T, hidden]."""
        if self.config.mla_gate is not None:
            gate = self.g_proj(x).float().sigmoid().unflatten(-1, (self.config.num_attention_heads, -1))
            attended = attended * gate
        result: Tensor = self.dense(attended.flatten(-2))
        return result

    def forward(self, x: Tensor, positions: Tensor, state: MlaState | None, visible: Tensor) -> Tensor:
        """x [B, T, hidden]; `visible` [B or 1, T, S]: which of the S cached and new keys a query may see."""
        q, k, v = self.project(x, positions)
        if state is not None:
            k, v = state.append(k, v)
        return self.output(attend(q, k, v, visible, []), x)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Softmax attention over shared keys plus, for each query, its own private keys.

    q: [B, T, H, K]; k: [B, S, H, K]; v: [B, S, H, V]; visible: [B or 1, T, S]; each entry of `own` is a pair
    (k [B, T, H, K], v [B, T, H, V]) of which query t sees row t only. Returns [B, T, H, V].
    """
    scores = torch.einsum("bthk,bshk->bhts", q, k).float()
    scores = scores.masked_fill(~visible.unsqueeze(1), torch.finfo(torch.float32).min)
    private = [(q * key).sum(-1).movedim(1, 2).unsqueeze(-1) for key, _ in own]
    weights = torch.cat([scores, *private], dim=-1).softmax(-1)
    shared = k.shape[1]
    out = torch.einsum("bhts,bshv->bthv", weights[..., :shared], v)
    for i, (_, value) in enumerate(own):
        out = out + weights[..., shared + i].movedim(1, 2).unsqueeze(-1) * value
    return out
