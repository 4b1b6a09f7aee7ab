# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling bench kernels`: our kernels on Ling-3.0-flash's shapes, against the byte floor and vLLM's own path.

Every figure is the median of CUDA-graph replays that rotate over enough layers to defeat the L2 cache; vLLM's path runs
in the same process on layers of the same shapes. RMS errors are against plain fp32 torch on the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from vllm_ling.bench.layers import FLASH, random_fp8, random_moe_layer
from vllm_ling.bench.timing import Timing, time_graph
from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.decode_moe import MoEDecoder
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.moe_reference import moe_reference, route

VOCABULARY = 157184
IN_PROJECTION = 5 * 4096  # q, k, v, f, g
LAYERS = 12
_SCALING = 2.5


@dataclass
class Row:
    """One kernel at one token count; times in microseconds, `None` where nothing was measured."""

    kernel: str
    tokens: int
    us: float
    us_low: float
    us_high: float
    floor_us: float | None
    stock_us: float | None = None
    rms_error: float | None = None
    floor_bytes: int | None = None
    dram_bytes: int | None = None


def _row(
    kernel: str, tokens: int, timing: Timing, floor: float, bandwidth: float, error: float | None
) -> Row:
    return Row(
        kernel, tokens, timing.us, timing.low, timing.high, floor / bandwidth * 1e6, None, error, int(floor)
    )


def _rms(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _tokens(count: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, width, device=device, dtype=torch.float32).bfloat16()


def moe_rows(device: torch.device, bandwidth: float, say: Callable[[str], None]) -> list[Row]:
    """Router to combined output with the shared expert, 1 to 8 tokens."""
    decoder = MoEDecoder(FLASH, gpu_of(device), device, default_cache())
    layers = [random_moe_layer(FLASH, device) for _ in range(LAYERS)]
    expert = 3 * FLASH.intermediate * FLASH.hidden * 17 / 32  # 4 bits and an 8-bit scale per 32
    rows = []
    for tokens in (1, 2, 4, 8):
        xs = [_tokens(tokens, FLASH.hidden, device) for _ in layers]
        outs = [torch.empty_like(x) for x in xs]
        calls = [
            partial(decoder, x, w, out, _SCALING, 0.0, 0.0)
            for x, w, out in zip(xs, layers, outs, strict=True)
        ]
        timing = time_graph(calls)
        error = _rms(outs[0], moe_reference(FLASH, xs[0], layers[0], _SCALING, 0.0, 0.0))
        unique = sum(
            len(route(FLASH, x, w, _SCALING)[1].unique()) for x, w in zip(xs, layers, strict=True)
        ) / len(layers)
        fixed = 4 * FLASH.experts * FLASH.hidden + 3 * FLASH.shared * FLASH.hidden
        rows.append(_row("moe_block", tokens, timing, fixed + unique * expert, bandwidth, error))
        say(f"moe_block, {tokens} tokens: {timing.us:.1f} us, {unique:.1f} experts")
    return rows


def gemv_rows(device: torch.device, bandwidth: float, say: Callable[[str], None]) -> list[Row]:
    """The FP8 output head with and without argmax, and KDA's merged in-projection."""
    rows = []
    for kernel, count, row_scales, argmax, copies in (
        ("lm_head", VOCABULARY, True, False, 4),
        ("lm_head_argmax", VOCABULARY, True, True, 4),
        ("kda_in_proj", IN_PROJECTION, False, False, LAYERS),
    ):
        shape = GemvShape(count, FLASH.hidden, row_scales, argmax)
        gemv = Fp8Gemv(shape, gpu_of(device), device, default_cache())
        weights = [random_fp8(count, FLASH.hidden, device) for _ in range(copies)]
        if row_scales:
            weights = [
                (w, torch.rand(count, device=device, dtype=torch.float32) * 1e-3 + 1e-4) for w, _ in weights
            ]
        for tokens in (1, 4):
            x = _tokens(tokens, FLASH.hidden, device)
            out = (
                torch.empty(tokens, dtype=torch.int64, device=device)
                if argmax
                else torch.empty(tokens, count, dtype=torch.bfloat16, device=device)
            )
            timing = time_graph([partial(gemv, x, w, s, out) for w, s in weights])
            gemv(x, *weights[0], out)
            w, s = weights[0]
            exact = (x.float() @ w.float().T) * s if row_scales else x.float() @ dequantize_block_fp8(w, s).T
            error = None if argmax else _rms(out, exact)
            if argmax and not torch.equal(out, exact.bfloat16().float().argmax(-1)):
                say(f"{kernel}, {tokens} tokens: the argmax of BF16 and fp32 logits differ (a near tie)")
            rows.append(_row(kernel, tokens, timing, w.nbytes + s.nbytes, bandwidth, error))
            say(f"{kernel}, {tokens} tokens: {timing.us:.1f} us")
    return rows


def stock_rows(model: Any, say: Callable[[str], None]) -> tuple[dict[tuple[str, int], float], list[Row]]:
    """vLLM's own path on the layers of a loaded model, by (kernel, tokens), and the prefill row. Runs in the worker."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from vllm_ling.models.moe_block import LingMoE

    blocks = [block for block in model.modules() if isinstance(block, LingMoE)][:LAYERS]
    kda = [layer.self_attn for layer in model.model.layers if hasattr(layer.self_attn, "f_proj")][:LAYERS]
    device = next(model.parameters()).device
    found: dict[tuple[str, int], float] = {}

    def project(attention: Any, x: torch.Tensor) -> None:
        merged = attention.qkv_proj if attention.qkv_proj is not None else attention.qkvb_proj
        for layer in (merged, attention.f_proj, attention.g_proj):
            Fp8LinearMethod.apply(layer.quant_method, layer, x)

    for tokens in (1, 4):
        x = _tokens(tokens, FLASH.hidden, device)
        found["moe_block", tokens] = time_graph([partial(block.stock, x) for block in blocks]).us
        found["kda_in_proj", tokens] = time_graph([partial(project, attention, x) for attention in kda]).us
        say(f"vLLM's MoE block, {tokens} tokens: {found['moe_block', tokens]:.1f} us")
        say(f"vLLM's KDA projections, {tokens} tokens: {found['kda_in_proj', tokens]:.1f} us")
        heads = [torch.randn(VOCABULARY, FLASH.hidden, device=device, dtype=torch.bfloat16) for _ in range(2)]
        found["lm_head", tokens] = time_graph([partial(F.linear, x, head) for head in heads]).us
        found["lm_head_argmax", tokens] = time_graph([partial(_argmax, x, head) for head in heads]).us
    x = _tokens(4096, FLASH.hidden, device)
    ours = time_graph([partial(block.forward, x) for block in blocks], rounds=1)
    stock = time_graph([partial(block.stock, x) for block in blocks], rounds=1)
    say(f"MoE prefill, 4096 tokens: {ours.us:.0f} us, vLLM {stock.us:.0f} us")
    return found, [Row("moe_prefill", 4096, ours.us, ours.low, ours.high, None, stock.us)]


def _argmax(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return F.linear(x, head).argmax(-1)


def with_stock(rows: Sequence[Row], stock: dict[tuple[str, int], float]) -> list[dict[str, Any]]:
    """The rows as JSON data, with vLLM's figures beside ours."""
    for row in rows:
        row.stock_us = stock.get((row.kernel, row.tokens), row.stock_us)
    return [asdict(row) for row in rows]
