# SPDX-License-Identifier: Apache-2.0
"""Decode kernels against fp32 references on the same bytes: RMS error at most 5e-3, and controls that must fail.

The bound: outputs are rounded to BF16 (relative RMS 1.7e-3) and the SwiGLU activations too, before the second GEMM.
"""

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.decode_moe import MoEDecoder, MoEShape, MoEWeights
from vllm_ling.quant.jit import Kernel, build
from vllm_ling.quant.layout import to_fragment_scales, to_fragments
from vllm_ling.quant.mxfp4 import dequantize_mxfp4

pytestmark = pytest.mark.gpu
RMS = 5e-3
SHAPES = {
    "flash": MoEShape(hidden=2560, intermediate=768, experts=64, top_k=8, groups=8, top_groups=4),
    "tiny": MoEShape(hidden=256, intermediate=128, experts=32, top_k=4, groups=4, top_groups=2),
}


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    torch.zeros(1, device="cuda")  # creates the context that the driver API needs
    torch.manual_seed(0)
    return torch.device("cuda")


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def rms(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def random_layer(s: MoEShape, scales: tuple[int, int]) -> tuple[MoEWeights, list[torch.Tensor]]:
    def codes(rows: int, cols: int) -> list[torch.Tensor]:
        packed = torch.randint(0, 256, (s.experts, rows, cols // 2), dtype=torch.uint8, device="cuda")
        return [
            packed,
            torch.randint(*scales, (s.experts, rows, cols // 32), dtype=torch.uint8, device="cuda"),
        ]

    def fp8(rows: int, cols: int) -> list[torch.Tensor]:
        scale = torch.exp2(torch.randint(-12, -9, (rows // 128, cols // 128), device="cuda").float())
        return [(torch.randn(rows, cols, device="cuda") * 40).to(torch.float8_e4m3fn), scale]

    raw = codes(2 * s.intermediate, s.hidden) + codes(s.hidden, s.intermediate)
    shared = fp8(2 * s.intermediate, s.hidden) + fp8(s.hidden, s.intermediate)
    gate, bias = (
        torch.randn(s.experts, s.hidden, device="cuda") * 0.02,
        torch.randn(s.experts, device="cuda") * 0.01,
    )
    experts = [
        to_fragments(raw[0]),
        to_fragment_scales(raw[1]),
        to_fragments(raw[2]),
        to_fragment_scales(raw[3]),
    ]
    return MoEWeights(gate, bias, *experts, *shared), raw


def swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = hidden.chunk(2)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit) if limit else F.silu(gate) * up


def reference(
    s: MoEShape, x: torch.Tensor, w: MoEWeights, raw: list[torch.Tensor], limit: float, drop: int = -1
) -> torch.Tensor:
    score = torch.sigmoid(x.float() @ w.gate.T)
    grouped = (score + w.bias).view(len(x), s.groups, -1)
    best = grouped.topk(2, -1).values.sum(-1).topk(s.top_groups, -1).indices
    keep = torch.zeros(len(x), s.groups, device="cuda").scatter(1, best, 1).bool()[..., None]
    ids = grouped.masked_fill(~keep, -1e30).flatten(1).topk(s.top_k, -1).indices
    weights = score.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * 2.5
    w1, w2 = dequantize_block_fp8(w.shared_w13, w.shared_s13), dequantize_block_fp8(w.shared_w2, w.shared_s2)
    out = torch.stack([w2 @ swiglu(w1 @ token, limit) for token in x.float()])
    for t, token in enumerate(x.float()):
        for slot, (weight, e) in enumerate(zip(weights[t], ids[t].tolist(), strict=True)):
            if slot != drop:
                hidden = swiglu(dequantize_mxfp4(raw[0][e], raw[1][e]) @ token, limit)
                out[t] += weight * (dequantize_mxfp4(raw[2][e], raw[3][e]) @ hidden)
    return out


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("limit", [0.0, 0.5], ids=["no clamp", "clamp"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(SHAPES))
def test_moe_block(name: str, tokens: int, limit: float, pdl: bool, device: torch.device) -> None:
    shape = SHAPES[name]
    weights, raw = random_layer(shape, (117, 122))
    x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
    if tokens == 4:
        x[1] = x[0]  # two tokens with the same experts
    out = torch.full_like(x, torch.nan)
    MoEDecoder(shape, 8, device, arch(), None, pdl)(x, weights, out, 2.5, limit, limit)
    assert rms(out, reference(shape, x, weights, raw, limit)) < RMS
    assert rms(out, reference(shape, x, weights, raw, limit, drop=shape.top_k - 1)) > RMS
    assert rms(out, reference(shape, x, weights, raw, 0.0 if limit else 0.5)) > RMS
    raw[3] += 1
    assert rms(out, reference(shape, x, weights, raw, limit)) > RMS


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("row_scales", [0, 1], ids=["block scales", "row scales"])
@pytest.mark.parametrize("rows", [20480, 1024, 1000])
def test_gemv(rows: int, row_scales: int, tokens: int, device: torch.device) -> None:
    if rows % 128 and not row_scales:
        pytest.skip("block scales come in whole blocks of 128 rows")
    k = 2560
    defines = {
        "K": k,
        "TOKENS": tokens,
        "WARPS": 8,
        "ROW_SCALES": row_scales,
        "ARGMAX": row_scales,
        "USE_PDL": 1,
    }
    cubin = build("fp8_gemv.cu", defines | {"ARGMAX": 0}, arch(), None).cubin
    weight = (torch.randn(rows, k, device=device) * 20).to(torch.float8_e4m3fn)
    x = torch.randn(tokens, k, device=device).bfloat16()
    y = torch.full((tokens, rows), torch.nan, device=device, dtype=torch.bfloat16)
    if row_scales:
        scale = torch.rand(rows, device=device) * 1e-3
        exact = (x.float() @ weight.float().T) * scale
    else:
        scale = torch.exp2(torch.randint(-10, -7, (rows // 128, k // 128), device=device).float())
        exact = x.float() @ dequantize_block_fp8(weight, scale).T
    launch(Kernel(cubin, "fp8_gemv"), x, weight, scale, y, None, rows)
    assert rms(y, exact) < RMS
    assert rms(y, exact * torch.linspace(0.9, 1.1, rows, device=device)) > RMS
    if row_scales:
        check_argmax(build("fp8_gemv.cu", defines, arch(), None).cubin, x, weight, scale, y)


def launch(
    kernel: Kernel, x: Any, weight: Any, scale: Any, y: Any, best: Any, rows: int, ctas: int = 132
) -> None:
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in (x, weight, scale, y, best))
    types = (ctypes.c_void_p,) * 5 + (ctypes.c_int,) * 2
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch((ctas, 1), 256, (*pointers, x.shape[0], rows), types, stream, True)


def check_argmax(cubin: bytes, x: Any, weight: Any, scale: Any, logits: Any) -> None:
    ctas = 132
    best = torch.empty(ctas * 8 * 8, 2, device="cuda")
    ids = torch.empty(8, dtype=torch.int64, device="cuda")
    launch(Kernel(cubin, "fp8_gemv"), x, weight, scale, logits, best, weight.shape[0], ctas)
    stream = torch.cuda.current_stream().cuda_stream
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    values = (best.data_ptr(), ids.data_ptr(), ctas * 8)
    Kernel(cubin, "argmax_of_best").launch((x.shape[0], 1), 256, values, types, stream, True)
    assert ids[: x.shape[0]].tolist() == logits.float().argmax(-1).tolist()
