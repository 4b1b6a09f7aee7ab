# SPDX-License-Identifier: Apache-2.0
"""The fused path's view of vLLM's loaded MLA modules and of a batch as their attention sees it; see `from_vllm`."""

from typing import Any

import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3MLAAttention

from vllm_ling.decode.from_vllm import Kernels, Unsuitable, bf16, norm_of, projection
from vllm_ling.decode.layers import LatentAttention, MlaLayer, Norm
from vllm_ling.decode.mla_attention import LatentWeights, MlaBatch, weights_problem
from vllm_ling.decode.mla_prepare import VALUE, MlaInputs, MlaShape, MlaWeights
from vllm_ling.quant.jit import CompileError
from vllm_ling.status import choose


def mla_layer(kernels: Kernels, attention: BailingMoeV3MLAAttention, norm: Norm) -> MlaLayer:
    """An MLA layer. Attention itself is ours where its cache and projections allow it, else vLLM's."""
    if attention.q_proj is None or attention.kv_a_proj_with_mqa is None:
        raise Unsuitable("MLA compresses its queries (q_lora_rank)")
    if attention.gated_attention_proj_granularity_type != "head_wise" or attention.v_head_dim != VALUE:
        raise Unsuitable("MLA's output gate is not one number per head of 128")
    rotary = attention.rotary_emb
    if rotary.is_neox_style or type(rotary).__name__ not in ("RotaryEmbedding", "YaRNScalingRotaryEmbedding"):
        raise Unsuitable(f"MLA rotates by {type(rotary).__name__}")
    heads, width = attention.num_heads, attention.num_heads * attention.v_head_dim
    shape = MlaShape(
        heads,
        attention.hidden_size,
        attention.qk_nope_head_dim,
        attention.qk_rope_head_dim,
        attention.kv_lora_rank,
    )
    latent_norm, eps = norm_of(attention.kv_a_layernorm)
    weights = MlaWeights(
        latent_norm=latent_norm,
        gate=bf16(attention.g_proj.weight, "g_proj"),
        cos_sin=bf16(rotary.cos_sin_cache, "the rotary table"),
        eps=eps,
    )
    attend = attention.mla_attn.mla_attn

    def attended(inputs: MlaInputs) -> torch.Tensor:
        tokens = inputs.query.shape[0]
        output: torch.Tensor = attend(inputs.query, inputs.latent, inputs.key, output_shape=(tokens, width))
        return output

    return MlaLayer(
        norm,
        projection(
            kernels, (attention.q_proj, attention.kv_a_proj_with_mqa), "norm", "MLA's q_proj and kv_a_proj"
        ),
        kernels.mla(shape),
        weights,
        attended,
        projection(kernels, (attention.dense,), "gated", "MLA's dense"),
        latent_attention(kernels, attend, shape),
    )


def latent_attention(kernels: Kernels, attend: Any, shape: MlaShape) -> LatentAttention | None:
    """Our attention in place of `attend` (vLLM's `MLAAttention`), or None with the reason logged."""
    problem = attention_problem(attend)
    if problem is None:
        try:
            kernel = kernels.attention(shape, LatentWeights(attend.W_UK_T, attend.W_UV).latent_contiguous)
        except (ValueError, CompileError) as error:
            problem = str(error)
    if problem is not None:
        choose("mla attention", "vLLM", problem)
        return None
    choose("mla attention", "ling", f"up to {kernel.max_tokens} tokens in the latent space")

    def batch(tokens: int) -> MlaBatch | None:
        found, reason = mla_batch(attend, tokens, kernel.max_tokens)
        if found is None:
            choose(f"mla attention: {reason}", "vLLM", "this batch is not for our kernel")
        return found

    return LatentAttention(
        kernel, lambda: LatentWeights(attend.W_UK_T, attend.W_UV), batch, float(attend.impl.scale)
    )


def attention_problem(attend: Any) -> str | None:
    """Why our kernels cannot replace a loaded `MLAAttention`, or None."""
    if attend.kv_cache_dtype not in ("auto", "bfloat16"):
        return f"the KV cache is {attend.kv_cache_dtype}"
    if getattr(attend.impl, "dcp_world_size", 1) > 1 or getattr(attend, "use_pcp", False):
        return "the context is spread over several GPUs"
    if getattr(attend.impl, "is_sparse", False) or getattr(attend, "hisparse_cache", None) is not None:
        return "the attention is sparse"
    if not isinstance(getattr(attend, "W_UK_T", None), torch.Tensor):
        return "vLLM keeps no BF16 projections into the latent space"
    return weights_problem(LatentWeights(attend.W_UK_T, attend.W_UV))


def mla_batch(attend: Any, tokens: int, most: int) -> tuple[MlaBatch | None, str]:
    """The batch of the current forward pass, or None and what speaks against the kernel."""
    context = get_forward_context()
    plans, mappings = context.attn_metadata, context.slot_mapping
    plan = plans.get(attend.layer_name) if isinstance(plans, dict) else None
    slots = mappings.get(attend.layer_name) if isinstance(mappings, dict) else None
    if plan is None or slots is None:
        return None, "vLLM has no plan for it"
    if has_kv_transfer_group():
        return None, "a KV connector follows vLLM's attention layer by layer"
    if plan.decode is None or plan.num_prefills or not plan.causal:
        return None, "it holds a prompt"
    if tokens > most:
        return None, f"the GPU has room for {most} tokens only"
    cache, lengths = attend.kv_cache, plan.decode.seq_lens
    blocks, starts = plan.decode.block_table, plan.query_start_loc[: lengths.shape[0] + 1]
    aligned = cache.stride(0) % 8 == 0 and cache.data_ptr() % 16 == 0
    if cache.dtype != torch.bfloat16 or cache.stride()[1:] != (cache.shape[2], 1) or not aligned:
        return None, f"the cache is {cache.dtype}, {tuple(cache.shape)}, {cache.stride()}"
    if any(t.dtype != torch.int32 or t.stride(-1) != 1 for t in (lengths, blocks, starts)):
        return None, "its block table or lengths are not contiguous int32"
    if slots.dtype != torch.int64 or slots.shape[0] < tokens:
        return None, f"its slots are {slots.dtype} of {slots.shape[0]}"
    return MlaBatch(cache, slots, blocks, starts, lengths), ""
