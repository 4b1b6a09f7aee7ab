# SPDX-License-Identifier: Apache-2.0
"""The fused path's view of vLLM's loaded modules (MLA's: `mla_from_vllm`): nothing is copied, every tensor is theirs.

Every function raises `Unsuitable` with the reason why a model stays on vLLM's layers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.bailing_moe_v3 import (
    BailingMoeV3KimiDeltaAttention,
    BailingMoeV3MLP,
)

from vllm_ling.decode.kda_step import KdaBatch, KdaShape, KdaStates, KdaStep, KdaWeights
from vllm_ling.decode.layers import DenseLayer, KdaLayer, MoELayer, Norm, Projection
from vllm_ling.decode.mla_attention import MlaAttention
from vllm_ling.decode.mla_prepare import MlaPrepare, MlaShape
from vllm_ling.models.moe_block import LingMoE
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape, Prologue
from vllm_ling.quant.jit import Gpu, gpu_of
from vllm_ling.quant.linear_decode import gemv_for


class Unsuitable(Exception):
    """Why the fused path cannot serve a module."""


class Kernels:
    """The compiled kernels of one device, made on demand and shared by all layers."""

    def __init__(self, device: torch.device, cache: Path | None) -> None:
        self.device, self._cache = device, cache
        self._gpu: Gpu = gpu_of(device)
        self._kda: dict[KdaShape, KdaStep] = {}
        self._mla: dict[MlaShape, MlaPrepare] = {}
        self._attention: dict[tuple[MlaShape, bool], MlaAttention] = {}

    def gemv(self, shape: GemvShape) -> Fp8Gemv:
        """See `linear_decode.gemv_for`."""
        return gemv_for(shape, self.device)

    def kda(self, shape: KdaShape) -> KdaStep:
        """The kernels for one KDA shape."""
        if shape not in self._kda:
            self._kda[shape] = KdaStep(shape, self._gpu, self._cache)
        return self._kda[shape]

    def mla(self, shape: MlaShape) -> MlaPrepare:
        """The kernel for one MLA shape."""
        if shape not in self._mla:
            self._mla[shape] = MlaPrepare(shape, self._gpu, self._cache)
        return self._mla[shape]

    def attention(self, shape: MlaShape, latent_contiguous: bool) -> MlaAttention:
        """The attention kernels for one MLA shape; see `LatentWeights`."""
        key = shape, latent_contiguous
        if key not in self._attention:
            self._attention[key] = MlaAttention(*key, self._gpu, self.device, self._cache)
        return self._attention[key]


def norm_of(module: Any) -> Norm:
    """Weight and epsilon of an RMSNorm."""
    return bf16(module.weight, "a norm"), float(module.variance_epsilon)


def bf16(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """`tensor`, if it is contiguous BF16."""
    if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
        raise Unsuitable(f"{what} is {tensor.dtype}, not contiguous BF16")
    return tensor.detach()


def float32(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """`tensor`, if it is contiguous float32."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise Unsuitable(f"{what} is {tensor.dtype}, not contiguous float32")
    return tensor.detach()


def projection(kernels: Kernels, layers: Sequence[Any], prologue: Prologue, what: str) -> Projection:
    """Block-FP8 linear layers that read the same input, as one matrix."""
    for layer in layers:
        if problem := getattr(layer, "ling_problem", ""):
            raise Unsuitable(f"{what}: {problem}")
        if not hasattr(layer, "ling_scales"):
            raise Unsuitable(f"{what} is not read by our FP8 kernel (ling.linear=ling, block-FP8 weights)")
        if getattr(layer, "bias", None) is not None:
            raise Unsuitable(f"{what} has a bias")
    weights = [layer.weight.detach() for layer in layers]
    parts = tuple(weight.shape[0] for weight in weights)
    shape = GemvShape(
        sum(parts), weights[0].shape[1], False, prologue=prologue, parts=parts if len(parts) > 1 else ()
    )
    return Projection(kernels.gemv(shape), weights, [layer.ling_scales for layer in layers])


def kda_layer(kernels: Kernels, attention: BailingMoeV3KimiDeltaAttention, norm: Norm) -> KdaLayer:
    """A KDA layer."""
    if attention.qkv_proj is None or attention.b_proj is None:
        raise Unsuitable("b_proj is quantized together with q, k and v")
    if attention.head_dim != 128 or attention.conv_size != 4:
        raise Unsuitable(
            f"KDA heads of {attention.head_dim} or convolutions over {attention.conv_size} tokens"
        )
    shape = KdaShape(attention.num_heads, attention.hidden_size, bool(attention.safe_gate))

    def conv(name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(attention, name).weight
        return float32(weight, name).view(-1, 4)

    weights = KdaWeights(
        b=bf16(attention.b_proj.weight, "b_proj"),
        q_conv=conv("q_conv1d"),
        k_conv=conv("k_conv1d"),
        v_conv=conv("v_conv1d"),
        a_log=float32(attention.A_log, "A_log"),
        dt_bias=float32(attention.dt_bias, "dt_bias"),
        o_norm=bf16(attention.o_norm.weight, "o_norm"),
        eps=attention.o_norm.eps,
        lower_bound=attention.lower_bound,
    )
    dim_first = is_conv_state_dim_first()

    def states() -> KdaStates:
        conv_state, recurrent = attention.kv_cache
        return KdaStates(conv_state if dim_first else conv_state.transpose(-1, -2), recurrent)

    return KdaLayer(
        attention.prefix,
        norm,
        projection(
            kernels, (attention.qkv_proj, attention.f_proj, attention.g_proj), "norm", "KDA's in_proj"
        ),
        kernels.kda(shape),
        weights,
        states,
        projection(kernels, (attention.o_proj,), "none", "KDA's o_proj"),
    )


def states_problem(layer: KdaLayer) -> str:
    """Why the layer's state pool does not suit the kernel, or ""."""
    states = layer.states()
    heads = layer.step.shape.heads
    if states.recurrent.dtype != torch.float32 or states.conv.dtype != torch.bfloat16:
        return f"KDA states are {states.recurrent.dtype} and {states.conv.dtype}, not float32 and BF16"
    if states.recurrent.shape[1:] != (heads, 128, 128) or states.recurrent.stride()[1:] != (16384, 128, 1):
        return f"KDA states are laid out as {tuple(states.recurrent.shape)}, {states.recurrent.stride()}"
    return ""


def moe_layer(block: Any, norm: Norm, device: torch.device) -> MoELayer:
    """An MoE block, after its own decision (see `models.moe_block`)."""
    if not isinstance(block, LingMoE):
        raise Unsuitable("the experts are not read by our MoE kernel (ling.moe=ling)")
    probe = torch.empty(1, block.hidden_size, dtype=torch.bfloat16, device=device)
    if not block.ling_group.usable(probe):
        raise Unsuitable("our MoE kernel was not taken")
    decoder = block.ling_group.decoder
    assert decoder is not None
    return MoELayer(
        norm,
        decoder,
        block.current_weights,
        block.routed_scaling_factor,
        block.expert_swiglu_limit or 0.0,
        block.share_expert_swiglu_limit or 0.0,
    )


def dense_layer(kernels: Kernels, mlp: BailingMoeV3MLP, norm: Norm) -> DenseLayer:
    """A dense MLP."""
    if type(mlp.act_fn) is not SiluAndMul:
        raise Unsuitable(f"a dense MLP activates by {type(mlp.act_fn).__name__}")
    return DenseLayer(
        norm,
        projection(kernels, (mlp.gate_up_proj,), "norm", "the dense gate_up_proj"),
        projection(kernels, (mlp.down_proj,), "swiglu", "the dense down_proj"),
    )


def mlp_layer(kernels: Kernels, mlp: Any, norm: Norm) -> MoELayer | DenseLayer:
    """Whatever follows attention in a decoder layer."""
    if isinstance(mlp, BailingMoeV3MLP):
        return dense_layer(kernels, mlp, norm)
    return moe_layer(mlp, norm, kernels.device)


def kda_batches(
    plans: Mapping[str, Any], names: Sequence[str], tokens: int
) -> tuple[dict[str, KdaBatch], str]:
    """The sequences of every KDA layer named, or nothing and what speaks against the kernel.

    vLLM keeps the layers' states in several groups (`kv_cache_groups`), and a sequence has other slots in each; layers
    of a group share one plan.
    """
    known: dict[int, KdaBatch] = {}
    for name in names:
        plan = plans[name]
        if id(plan) not in known:
            batch, problem = kda_batch(plan, tokens)
            if batch is None:
                return {}, problem
            known[id(plan)] = batch
    return {name: known[id(plans[name])] for name in names}, ""


def kda_batch(metadata: Any, tokens: int) -> tuple[KdaBatch | None, str]:
    """The sequences of vLLM's GDN metadata, or None and what speaks against the kernel."""
    if metadata.spec_sequence_masks is not None:
        slots, starts = metadata.spec_state_indices_tensor, metadata.spec_query_start_loc
        batch = KdaBatch(slots, starts, metadata.num_accepted_tokens, slots.shape[1])
    else:
        batch = KdaBatch(metadata.non_spec_state_indices_tensor[:tokens])
    for tensor in (batch.slots, batch.starts, batch.accepted):
        # One slot a sequence may come from any column of vLLM's block table.
        scattered = (
            tensor is not None
            and tensor.stride(-1) != 1
            and not (tensor is batch.slots and tensor.dim() == 1)
        )
        if tensor is not None and (tensor.dtype != torch.int32 or scattered):
            return None, f"an index of the batch is {tensor.dtype} with strides {tensor.stride()}"
    return batch, ""
