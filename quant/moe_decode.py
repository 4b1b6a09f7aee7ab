# SPDX-License-Identifier: Apache-2.0
"""What the MoE decode kernel needs from vLLM's loaded layers, and the comparison with vLLM's own path."""

from typing import Any

import torch

from vllm_ling.quant.decode_moe import TOKEN_COUNTS, MoEShape, MoEWeights, unsupported
from vllm_ling.quant.linear_check import random_tokens

# Our path keeps BF16 activations where vLLM quantizes those of the shared expert to FP8 (about 3%), and a near tie may
# be routed to the other expert. A wrong layout, scale or expert order gives an error of about 1.
CHECK_BOUND = 0.2


def decode_shape(block: Any) -> tuple[MoEShape | None, str]:
    """The kernel's shape for a `BailingMoeV3MoE`, or None and the reason why it cannot serve it."""
    experts = block.experts.routed_experts
    parallel = experts.moe_config.moe_parallel_config
    if parallel.tp_size > 1 or parallel.use_ep or parallel.dp_size > 1:
        return None, "the kernel serves one GPU; with parallel ranks vLLM's backend decodes"
    if not hasattr(experts, "humming_configs"):
        return (
            None,
            "the experts are not in Humming's layout (start with ling.moe=ling or --moe-backend humming)",
        )
    if (
        experts.input_schemas["w13"].a_dtype is not None
        and experts.input_schemas["w13"].a_dtype.num_bits != 16
    ):
        return None, "Humming quantizes the activations (W4A8), which changes its layout"
    groups, top_groups = block.ling_groups
    shape = MoEShape(
        hidden=block.hidden_size,
        intermediate=experts.moe_config.intermediate_size,
        experts=block.num_experts,
        top_k=block.top_k,
        groups=groups,
        top_groups=top_groups,
        shared_intermediate=block.shared_experts.gate_up_proj.weight.shape[0] // 2,
        gate_bf16=block.gate.weight.dtype == torch.bfloat16,
    )
    reason = unsupported(shape)
    return (None, reason) if reason else (shape, "")


def decode_weights(block: Any, shape: MoEShape) -> tuple[MoEWeights | None, str]:
    """Views of a loaded block's tensors in the kernel's form (only the shared expert's few scales are copied)."""
    experts, shared = block.experts.routed_experts, block.shared_experts
    n, k, e = 2 * shape.intermediate, shape.hidden, shape.experts
    found = {
        "w13": (experts.w13_weight, (e, k // 16, n // 64, 32, 4), torch.int32),
        "s13": (experts.w13_weight_scale, (e, k // 32, n // 64, 8, 8), torch.uint8),
        "w2": (experts.w2_weight, (e, n // 32, k // 64, 32, 4), torch.int32),
        "s2": (experts.w2_weight_scale, (e, n // 64, k // 64, 8, 8), torch.uint8),
    }
    tensors = {}
    for name, (tensor, size, dtype) in found.items():
        expected = torch.Size(size).numel() * dtype.itemsize
        if tensor.numel() * tensor.element_size() != expected or not tensor.is_contiguous():
            return (
                None,
                f"{name} has {tuple(tensor.shape)} {tensor.dtype}, expected {expected} contiguous bytes",
            )
        tensors[name] = tensor.view(torch.uint8).view(-1).view(dtype).view(size)
    for name, layer in (("w13", shared.gate_up_proj), ("w2", shared.down_proj)):
        # `linear_decode` keeps the stored scales where vLLM reorders them for its GEMM.
        scales, reason = getattr(layer, "ling_scales", None), ""
        if scales is None:
            scales, reason = block_scales(layer)
        if scales is None:
            return None, f"shared expert {name}: {reason}"
        tensors[f"shared_{name}"], tensors[f"shared_s{name[1:]}"] = layer.weight, scales
    bias = block.gate.expert_bias
    if bias.dtype != torch.float32 or not block.gate.weight.is_contiguous():
        return None, f"router: bias {bias.dtype}, gate contiguous {block.gate.weight.is_contiguous()}"
    return MoEWeights(gate=block.gate.weight, bias=bias, **tensors), ""


def block_scales(layer: Any) -> tuple[torch.Tensor | None, str]:
    """A block-FP8 layer's scales as contiguous float32 [ceil(rows / 128), ceil(k / 128)], or the reason why not."""
    weight = layer.weight
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or not weight.is_contiguous():
        return None, f"the weight is {weight.dtype} {tuple(weight.shape)}, not contiguous E4M3 [rows, k]"
    scale = getattr(layer, "weight_scale_inv", None)
    scale = getattr(layer, "weight_scale", None) if scale is None else scale
    size = (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    if scale is None or tuple(scale.shape) != size:
        return None, f"the scales are {None if scale is None else tuple(scale.shape)}, not {size}"
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.detach().float().contiguous(), ""


def check_block(block: Any, device: torch.device) -> float:
    """Relative RMS between our kernel and vLLM's path on random tokens of a loaded block, at the worst of the token
    counts that it is compiled for."""
    counts = [count for count in TOKEN_COUNTS if count <= block.ling_group.decoder.max_tokens]
    x = random_tokens(counts[-1], block.hidden_size, device)
    stock = block.stock(x).float()
    if not bool(stock.isfinite().all() and (stock != 0).any()):
        return float("nan")
    away = [
        (block.decode(x[:count]).float() - stock[:count]).square().mean() / stock[:count].square().mean()
        for count in counts
    ]
    return float(torch.stack(away).max().sqrt())
