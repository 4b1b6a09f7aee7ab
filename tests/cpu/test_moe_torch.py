# SPDX-License-Identifier: Apache-2.0
"""TorchMoEMethod in both modes against a plain loop over tokens and experts, for every format and awkward batches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.int4 import dequantize_int4, quantize_int4
from vllm_ling.quant.moe_torch import TorchMoEMethod
from vllm_ling.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4

HIDDEN, INTERMEDIATE, TOP_K, LIMIT = 256, 128, 4, 0.5
FORMATS = ("bf16", "fp8", "mxfp4", "int4")


def encode(fmt: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored fields of one matrix and the exact values they stand for."""
    if fmt == "bf16":
        return {"weight": weight}, weight
    if fmt == "fp8":
        values, scale = quantize_block_fp8(weight)
        return {"weight": values, "weight_scale_inv": scale}, dequantize_block_fp8(values, scale)
    if fmt == "mxfp4":
        packed, scale = quantize_mxfp4(weight)
        return {"weight": packed, "weight_scale": scale}, dequantize_mxfp4(packed, scale)
    packed, scale = quantize_int4(weight)
    return {"weight_packed": packed, "weight_scale": scale.float()}, dequantize_int4(
        packed, scale, torch.float32
    )


def build(fmt: str, experts: int, limit: float | None, mode: str) -> tuple[TorchMoEMethod, Any, list[Any]]:
    generator = torch.Generator().manual_seed(experts)
    moe: Any = SimpleNamespace(num_local_experts=experts)
    method = TorchMoEMethod(moe, fmt, limit, dequantize_at_load=mode == "torch")
    layer = torch.nn.Module()
    layer.expert_map = None
    method.create_weights(layer, experts, HIDDEN, INTERMEDIATE, torch.float32, weight_loader=None)
    exact = []
    for expert in range(experts):
        pair = []
        for stem, shape in (("w13", (2 * INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
            fields, values = encode(fmt, torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            for suffix, tensor in fields.items():
                getattr(layer, f"{stem}_{suffix}").data[expert].copy_(tensor)
            pair.append(values.float())
        exact.append(pair)
    method.process_weights_after_loading(layer)
    return method, layer, exact


def loop(
    exact: list[Any], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, limit: float | None
) -> Any:
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if expert < 0:
                continue
            w13, w2 = exact[expert]
            gate, up = (w13 @ x[token]).chunk(2)
            hidden = F.silu(gate) * up
            if limit is not None:
                hidden = F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
            out[token] += weight * (w2 @ hidden)
    return out


@pytest.mark.parametrize("mode", ["torch", "reference"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("experts", [16, 40], ids=["dense", "routed"])
@pytest.mark.parametrize("limit", [None, LIMIT], ids=["plain", "clamped"])
def test_equals_loop(fmt: str, mode: str, experts: int, limit: float | None) -> None:
    method, layer, exact = build(fmt, experts, limit, mode)
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 3, 17, 70):
        x = torch.randn(tokens, HIDDEN, generator=generator)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)])
        weights = torch.rand(tokens, TOP_K, generator=generator)
        expected = loop(exact, x, weights, ids, limit)
        actual = method.apply(layer, x, weights, ids.int())
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        if limit is not None:
            unclamped = loop(exact, x, weights, ids, None)
            assert not torch.allclose(actual, unclamped, rtol=1e-2, atol=1e-3), "the clamp never bites"


def test_expert_map_leaves_foreign_experts_out() -> None:
    method, layer, exact = build("mxfp4", 16, None, "torch")
    # This rank holds the 16 experts 16..31 of 32.
    layer.expert_map = torch.cat([torch.full((16,), -1), torch.arange(16)])
    x, weights = torch.randn(3, HIDDEN), torch.rand(3, TOP_K)
    ids = torch.tensor([[0, 16, 31, 2], [20, 21, 22, 23], [1, 2, 3, 4]])
    expected = loop(exact, x, weights, ids - 16, None)
    torch.testing.assert_close(method.apply(layer, x, weights, ids), expected, rtol=1e-4, atol=1e-5)
    assert not method.apply(layer, x, weights, ids)[2].any()
