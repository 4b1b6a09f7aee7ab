# SPDX-License-Identifier: Apache-2.0
"""A loaded flash as the fused path sees it: vLLM's classes around tensors without storage, kernels without code."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.models.bailing_moe_v3 import (
    BailingMoeV3KimiDeltaAttention,
    BailingMoeV3MLAAttention,
    BailingMoeV3MLP,
)

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.decode.kda_step import KdaShape
from vllm_ling.decode.mla_prepare import MlaShape
from vllm_ling.models.moe_block import LingMoE
from vllm_ling.quant.fp8_gemv import GemvShape

META = torch.device("meta")


class Kernels:
    """Notes what is asked for; `most` gives the tokens that a GEMV takes."""

    def __init__(self, most: Callable[[GemvShape], int] = lambda shape: 16) -> None:
        self.device, self._most = META, most
        self.asked: set[Any] = set()

    def __call__(self, *_: Any) -> "Kernels":
        return self  # stands in for the class, too

    def gemv(self, shape: GemvShape) -> Any:
        self.asked.add(shape)
        return SimpleNamespace(shape=shape, max_tokens=self._most(shape))

    def kda(self, shape: KdaShape) -> Any:
        self.asked.add(shape)
        return SimpleNamespace(shape=shape, max_tokens=8)

    def mla(self, shape: MlaShape) -> Any:
        self.asked.add(shape)
        return SimpleNamespace(shape=shape)

    def attention(self, shape: MlaShape, latent_contiguous: bool) -> Any:
        self.asked.add((shape, latent_contiguous))
        return SimpleNamespace(shape=shape, max_tokens=8)


def tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def fp8(rows: int, k: int) -> SimpleNamespace:
    """A linear layer that our method has loaded."""
    scales = tensor(-(-rows // 128), -(-k // 128), dtype=torch.float32)
    return SimpleNamespace(weight=tensor(rows, k, dtype=torch.float8_e4m3fn), ling_scales=scales)


def bf16(*size: int) -> SimpleNamespace:
    return SimpleNamespace(weight=tensor(*size), variance_epsilon=1e-6, eps=1e-6)


def bare(kind: type, **attributes: Any) -> Any:
    """A module of that class without its constructor, which would need an engine's configuration."""
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(attributes)
    return made


def kda_attention(s: LingShape) -> Any:
    heads, wide = s.num_attention_heads, s.num_attention_heads * s.head_dim

    def conv() -> SimpleNamespace:
        return SimpleNamespace(weight=tensor(wide, 1, 4, dtype=torch.float32))

    return bare(
        BailingMoeV3KimiDeltaAttention,
        num_heads=heads,
        hidden_size=s.hidden_size,
        head_dim=s.head_dim,
        conv_size=s.short_conv_kernel_size,
        safe_gate=True,
        lower_bound=-5.0,
        prefix="kda",
        qkv_proj=fp8(3 * wide, s.hidden_size),
        b_proj=bf16(heads, s.hidden_size),
        f_proj=fp8(wide, s.hidden_size),
        g_proj=fp8(wide, s.hidden_size),
        o_proj=fp8(s.hidden_size, wide),
        q_conv1d=conv(),
        k_conv1d=conv(),
        v_conv1d=conv(),
        A_log=tensor(1, 1, heads, 1, dtype=torch.float32),
        dt_bias=tensor(wide, dtype=torch.float32),
        o_norm=bf16(s.head_dim),
        kv_cache=(tensor(9, 3, 3 * wide), tensor(9, heads, 128, 128, dtype=torch.float32)),
    )


class RotaryEmbedding:
    """By its name and two attributes."""

    is_neox_style = False
    cos_sin_cache = tensor(64, 64)


def mla_attention(s: LingShape) -> Any:
    heads = s.num_attention_heads
    latent = tensor(s.kv_lora_rank, heads, s.qk_nope_head_dim + s.v_head_dim)
    key, value = latent.split([s.qk_nope_head_dim, s.v_head_dim], -1)
    attend = SimpleNamespace(
        kv_cache_dtype="auto",
        W_UK_T=key.permute(1, 2, 0),
        W_UV=value.transpose(0, 1),
        impl=SimpleNamespace(scale=0.1),
        layer_name="mla",
    )
    return bare(
        BailingMoeV3MLAAttention,
        num_heads=heads,
        hidden_size=s.hidden_size,
        qk_nope_head_dim=s.qk_nope_head_dim,
        qk_rope_head_dim=s.qk_rope_head_dim,
        v_head_dim=s.v_head_dim,
        kv_lora_rank=s.kv_lora_rank,
        gated_attention_proj_granularity_type=s.mla_gate,
        q_proj=fp8(heads * (s.qk_nope_head_dim + s.qk_rope_head_dim), s.hidden_size),
        kv_a_proj_with_mqa=fp8(s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size),
        kv_a_layernorm=bf16(s.kv_lora_rank),
        g_proj=bf16(heads, s.hidden_size),
        dense=fp8(s.hidden_size, heads * s.v_head_dim),
        rotary_emb=RotaryEmbedding(),
        mla_attn=SimpleNamespace(mla_attn=attend),
    )


def dense_mlp(s: LingShape) -> Any:
    act = SiluAndMul.__new__(SiluAndMul)
    return bare(
        BailingMoeV3MLP,
        gate_up_proj=fp8(2 * s.intermediate_size, s.hidden_size),
        down_proj=fp8(s.hidden_size, s.intermediate_size),
        act_fn=act,
    )


def moe_block(s: LingShape, most: int = 8) -> Any:
    group = SimpleNamespace(decoder=SimpleNamespace(max_tokens=most), usable=lambda x: True)
    limits = {"expert_swiglu_limit": None, "share_expert_swiglu_limit": None}
    return bare(LingMoE, hidden_size=s.hidden_size, ling_group=group, routed_scaling_factor=2.5, **limits)


def decoder_layer(s: LingShape, number: int) -> Any:
    """Layer `number`; the MTP layer's number is the first behind the target's."""
    return SimpleNamespace(
        input_layernorm=bf16(s.hidden_size),
        self_attn=kda_attention(s) if s.is_kda(number) else mla_attention(s),
        post_attention_layernorm=bf16(s.hidden_size),
        mlp=moe_block(s) if s.is_moe(number) else dense_mlp(s),
        eh_proj=fp8(s.hidden_size, 2 * s.hidden_size),
        enorm=bf16(s.hidden_size),
        hnorm=bf16(s.hidden_size),
    )


def target(s: LingShape) -> Any:
    layers = [decoder_layer(s, number) for number in range(s.num_hidden_layers)]
    return SimpleNamespace(model=SimpleNamespace(layers=layers))
