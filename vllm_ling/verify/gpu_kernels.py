# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a real layer's bytes: the MoE block, the FP8 products, and vLLM's FP8 GEMM on the head.

The reference is computed from the checkpoint's tensors, not from the kernel's layout, so the repacking is judged too.
"""

from typing import Any

import torch
import torch.nn.functional as F

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.finding import Outcome
from vllm_ling.quant.decode_moe import MoEDecoder, MoEWeights, unsupported
from vllm_ling.quant.expert_formats import e8m0_bytes
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.layout import to_fragment_scales, to_fragments
from vllm_ling.quant.tune import moe_shape
from vllm_ling.reference.load import StoredTensors
from vllm_ling.verify.head_layer import head_method, head_source
from vllm_ling.verify.real_layers import RealLayer
from vllm_ling.verify.stored_bytes import relative_rms

# As tests/gpu: outputs are rounded to BF16, activations of the experts to FP16 or BF16 before the second product.
_KERNEL = 5e-3
# vLLM's head GEMM also rounds the activations to E4M3 (2.6% a value).
_W8A8 = 0.06
_TOKEN_COUNTS = (1, 4)


def moe_errors(
    layer: RealLayer, shape: LingShape, device: torch.device
) -> tuple[dict[str, float], list[str]]:
    """Relative RMS by kernel and token count, and why something could not be compared."""
    errors: dict[str, float] = {}
    missing: list[str] = []
    name = f"{layer.prefix}.attention.q_proj.weight"
    if name in layer.stored.files and layer.stored.read(name).dtype == torch.float8_e4m3fn:
        errors |= _projection_errors(layer, name, device)
    if shape.fmt != "fp4":
        return errors, [f"{shape.fmt} experts run on vLLM's backend, which only `logits` compares"]
    kernel_shape = moe_shape(shape)
    shared_type = layer.stored.read(f"{layer.prefix}.mlp.shared_experts.gate_proj.weight").dtype
    reason = unsupported(kernel_shape)
    if shared_type != torch.float8_e4m3fn:
        reason = f"the shared expert is {shared_type}, the MoE kernel reads block FP8"
    if reason is not None:
        return errors, [f"the MoE kernel does not serve this shape: {reason}"]
    decoder = MoEDecoder(kernel_shape, gpu_of(device), device, default_cache())
    weights = kernel_weights(layer, device)
    for tokens in _TOKEN_COUNTS:
        if tokens > decoder.max_tokens:
            missing.append(f"the MoE kernel takes at most {decoder.max_tokens} tokens on this GPU")
            continue
        x = layer.inputs(tokens)
        exact = layer.routed(x, *layer.route(x)) + layer.shared(x)
        out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16, device=device)
        limits = (layer.limit or 0.0, layer.shared_limit or 0.0)
        decoder(x.bfloat16().to(device), weights, out, layer.config.routed_scaling_factor, *limits)
        errors[f"moe_block, {tokens} tokens"] = relative_rms(out.cpu(), exact)
    return errors, missing


def kernel_weights(layer: RealLayer, device: torch.device) -> MoEWeights:
    """The layer's tensors in the kernel's layout on `device`, repacked expert by expert."""
    tensors: dict[str, Any] = {}
    for stem, projections in (("13", ("gate_proj", "up_proj")), ("2", ("down_proj",))):
        for expert in range(layer.config.num_experts):
            module = f"{layer.prefix}.mlp.experts.{expert}"
            codes = [layer.stored.read(f"{module}.{p}.weight").view(torch.uint8) for p in projections]
            scales = [e8m0_bytes(layer.stored.read(f"{module}.{p}.weight_scale_inv")) for p in projections]
            packed = {
                f"w{stem}": to_fragments(torch.cat(codes)[None].to(device)),
                f"s{stem}": to_fragment_scales(torch.cat(scales)[None].to(device)),
            }
            for name, one in packed.items():
                if expert == 0:
                    size = (layer.config.num_experts, *one.shape[1:])
                    tensors[name] = torch.empty(size, dtype=one.dtype, device=device)
                tensors[name][expert] = one[0]
        shared = f"{layer.prefix}.mlp.shared_experts"
        weights = [layer.stored.read(f"{shared}.{p}.weight") for p in projections]
        blocks = [_block_scale(layer.stored, f"{shared}.{p}.weight") for p in projections]
        tensors[f"shared_w{stem}"] = torch.cat([w.view(torch.uint8) for w in weights]).to(device)
        tensors[f"shared_w{stem}"] = tensors[f"shared_w{stem}"].view(torch.float8_e4m3fn)
        tensors[f"shared_s{stem}"] = torch.cat(blocks).to(device)
    gate, bias = layer.router()
    return MoEWeights(gate=gate.contiguous().to(device), bias=bias.contiguous().to(device), **tensors)


def head_errors(stored: StoredTensors, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """vLLM's GEMM on the FP8 head, our product, and its argmax (as a share of wrong tokens)."""
    method, layer = head_method(stored, device)
    rows, hidden = layer.weight.shape
    block = head_source(stored) == "fp8_block"
    scale = method.scale(layer).data
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, hidden, generator=generator, dtype=torch.float32).bfloat16().to(device)
    from vllm_ling.quant.block_fp8 import dequantize_block_fp8

    weight = layer.weight.data
    if block:
        exact = F.linear(x.float(), dequantize_block_fp8(weight, scale))
    else:
        exact = F.linear(x.float(), weight.float()) * scale
    errors = {"vLLM's head GEMM, 4 tokens": relative_rms(method.apply(layer, x), exact)}
    for argmax in (False, True):
        shape = GemvShape(rows, hidden, row_scales=not block, argmax=argmax)
        try:
            gemv = Fp8Gemv(shape, gpu_of(device), device, default_cache())
        except ValueError as error:
            return errors, [f"the FP8 product does not serve the head: {error}"]
        if argmax:
            ids = torch.full((4,), -1, dtype=torch.int64, device=device)
            gemv(x, weight, scale, ids)
            # The kernel compares BF16 logits; the best of them in FP32 must be within one rounding of the chosen.
            picked = exact.gather(1, ids.clamp(0, rows - 1)[:, None])[:, 0]
            best = exact.max(-1).values
            errors["head argmax, wrong tokens"] = float((best - picked > 2.0**-6 * best.abs()).float().mean())
        else:
            out = torch.full((4, rows), torch.nan, dtype=torch.bfloat16, device=device)
            errors["head product, 4 tokens"] = relative_rms(gemv(x, weight, scale, out), exact)
    return errors, []


def beyond(where: str, errors: dict[str, float]) -> list[tuple[Outcome, str]]:
    """What is further from the reference than rounding explains."""
    found: list[tuple[Outcome, str]] = []
    for name, error in errors.items():
        if not error <= _bound(name):
            found.append(
                (
                    "fail",
                    f"{where}: {name}: {error:.3g} from the fp32 reference, at most {_bound(name):g} expected",
                )
            )
    return found


def worst(figures: dict[str, Any]) -> str:
    """The largest error per kernel."""
    found: dict[str, float] = {}
    for row in [*(layer.get("gpu", {}) for layer in figures["layers"].values()), figures["gpu_head"]]:
        for name, error in row.items():
            found[name] = max(error, found.get(name, 0.0))
    return ", ".join(f"{name} {error:.1e}" for name, error in found.items()) or "none ran"


def _bound(name: str) -> float:
    return _W8A8 if name.startswith("vLLM") else 0.0 if "argmax" in name else _KERNEL


def _projection_errors(layer: RealLayer, name: str, device: torch.device) -> dict[str, float]:
    """One block-FP8 projection through our product."""
    weight, exact_weight = layer.stored.read(name), layer.stored.weight(name)
    x = layer.inputs(4)
    try:
        shape = GemvShape(weight.shape[0], weight.shape[1], row_scales=False)
        gemv = Fp8Gemv(shape, gpu_of(device), device, default_cache())
    except ValueError:
        return {}  # this shape stays with vLLM's GEMM
    out = torch.full((4, weight.shape[0]), torch.nan, dtype=torch.bfloat16, device=device)
    scale = _block_scale(layer.stored, name).to(device)
    gemv(x.bfloat16().to(device), weight.to(device), scale, out)
    return {"q_proj product, 4 tokens": relative_rms(out.cpu(), F.linear(x, exact_weight))}


def _block_scale(stored: StoredTensors, name: str) -> torch.Tensor:
    scale = stored.read(f"{name}_scale_inv")
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float().contiguous()
