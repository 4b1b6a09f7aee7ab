# SPDX-License-Identifier: Apache-2.0
"""Decode kernels against fp32 references on the same bytes: RMS error at most 5e-3, and controls that must fail.

The bound: outputs are rounded to BF16 (relative RMS 1.7e-3), the activations of the routed experts to FP16 and those of
the shared expert to BF16 before the second product.
"""

import dataclasses

import pytest
import torch

from tests.relative_error import rms
from vllm_ling.bench.layers import random_fp8, random_moe_layer
from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.decode_moe import MoEDecoder, MoEShape, MoEWeights
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.moe_reference import moe_reference, route

pytestmark = pytest.mark.gpu
RMS = 5e-3
SCALING = 2.5
SHAPES = {
    "flash": MoEShape(hidden=2560, intermediate=768, experts=64, top_k=8, groups=8, top_groups=4),
    "flash tp2": MoEShape(hidden=2560, intermediate=384, experts=512, top_k=8, groups=8, top_groups=4),
    "tiny": MoEShape(hidden=256, intermediate=128, experts=32, top_k=4, groups=4, top_groups=2),
    "odd": MoEShape(
        hidden=640, intermediate=384, experts=96, top_k=6, groups=3, top_groups=2, gate_bf16=True
    ),
    "one group": MoEShape(
        hidden=1024, intermediate=256, experts=64, top_k=2, groups=1, top_groups=1, shared_intermediate=512
    ),
}


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    torch.zeros(1, device="cuda", dtype=torch.float32)  # creates the context that the driver API needs
    torch.manual_seed(0)
    return torch.device("cuda")


@pytest.fixture(scope="module")
def decoders() -> dict[tuple[str, bool], MoEDecoder]:
    return {}


def decoder(
    cache: dict[tuple[str, bool], MoEDecoder], name: str, pdl: bool, device: torch.device
) -> MoEDecoder:
    if (name, pdl) not in cache:
        cache[name, pdl] = MoEDecoder(SHAPES[name], gpu_of(device), device, default_cache(), pdl)
    return cache[name, pdl]


def run(
    kernel: MoEDecoder, x: torch.Tensor, w: MoEWeights, limit: float, **options: torch.Tensor
) -> torch.Tensor:
    """Four launches into poisoned outputs: all must agree to the bit."""
    outs = [torch.full_like(x, torch.nan) for _ in range(4)]
    for out in outs:
        kernel(x, w, out, SCALING, limit, limit, **options)
    assert all(torch.equal(out, outs[0]) for out in outs[1:]), "the same launch gave different bits"
    return outs[0]


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("limit", [0.0, 0.5], ids=["no clamp", "clamp"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", list(SHAPES))
def test_moe_block(
    name: str, tokens: int, limit: float, pdl: bool, device: torch.device, decoders: dict
) -> None:
    shape, kernel = SHAPES[name], decoder(decoders, name, pdl, device)
    w = random_moe_layer(shape, device)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.float32).bfloat16()
    if tokens == 4:
        x[1] = x[0]  # two tokens with the same experts
    out = run(kernel, x, w, limit)
    assert rms(out, moe_reference(shape, x, w, SCALING, limit, limit)) < RMS
    wrong_clamp = moe_reference(shape, x, w, SCALING, 0.0 if limit else 0.5, limit)
    assert rms(out, wrong_clamp) > RMS
    one_expert_less = moe_reference(
        dataclasses.replace(shape, top_k=shape.top_k - 1), x, w, SCALING, limit, limit
    )
    assert rms(out, one_expert_less) > RMS
    assert rms(out, moe_reference(shape, x, dataclasses.replace(w, s2=w.s2 + 1), SCALING, limit, limit)) > RMS
    assert (
        rms(
            out,
            moe_reference(shape, x, dataclasses.replace(w, shared_s2=w.shared_s2 * 0), SCALING, limit, limit),
        )
        > RMS
    )


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_all_tokens_on_the_same_experts(tokens: int, device: torch.device, decoders: dict) -> None:
    """The most activations a CTA can meet at once: they do not fit, and are staged in rounds."""
    shape, kernel = SHAPES["flash"], decoder(decoders, "flash", True, device)
    w = random_moe_layer(shape, device)
    x = torch.randn(1, shape.hidden, device=device, dtype=torch.float32).bfloat16().repeat(tokens, 1)
    out = run(kernel, x, w, 0.0)
    assert rms(out, moe_reference(shape, x, w, SCALING, 0.0, 0.0)) < RMS
    assert torch.equal(out, out[:1].repeat(tokens, 1)), "equal tokens, different outputs"


@pytest.mark.parametrize("tokens", [1, 4])
def test_routing_is_exact_and_ties_go_to_the_lower_expert(
    tokens: int, device: torch.device, decoders: dict
) -> None:
    shape, kernel = SHAPES["flash"], decoder(decoders, "flash", False, device)
    w = random_moe_layer(shape, device)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.float32).bfloat16()
    topk = (
        torch.empty(tokens, shape.top_k, device=device, dtype=torch.float32),
        torch.empty(tokens, shape.top_k, device=device, dtype=torch.int32),
    )
    run(kernel, x, w, 0.0, topk=topk)
    weights, ids = route(shape, x, w, SCALING)
    assert torch.equal(topk[1].sort(-1).values, ids.int().sort(-1).values)
    order, expected = topk[1].argsort(-1), ids.argsort(-1)
    assert torch.allclose(topk[0].gather(1, order), weights.gather(1, expected), rtol=1e-5)
    flat = dataclasses.replace(w, gate=torch.zeros_like(w.gate), bias=torch.zeros_like(w.bias))
    run(kernel, x, flat, 0.0, topk=topk)
    assert topk[1].sort(-1).values.tolist() == [list(range(shape.top_k))] * tokens


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("name", list(SHAPES))
def test_ties_between_experts_and_between_groups(
    name: str, tokens: int, device: torch.device, decoders: dict
) -> None:
    """Biases in steps of a quarter on equal scores: a stable sort says which expert, and which group, comes first."""
    shape, kernel = SHAPES[name], decoder(decoders, name, True, device)
    w = random_moe_layer(shape, device)
    steps = torch.randint(-3, 4, (shape.experts,), device=device).float() / 4
    w = dataclasses.replace(w, gate=torch.zeros_like(w.gate), bias=steps)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.float32).bfloat16()
    topk = (
        torch.empty(tokens, shape.top_k, device=device, dtype=torch.float32),
        torch.empty(tokens, shape.top_k, device=device, dtype=torch.int32),
    )
    run(kernel, x, w, 0.0, topk=topk)
    grouped = (steps + 0.5).view(shape.groups, -1)
    sums = grouped.topk(2, -1).values.sum(-1)
    groups = sums.sort(descending=True, stable=True).indices[: shape.top_groups]
    masked = torch.full_like(grouped, -torch.inf)
    masked[groups] = grouped[groups]
    expected = masked.flatten().sort(descending=True, stable=True).indices[: shape.top_k]
    assert topk[1].tolist() == [expected.tolist()] * tokens
    assert torch.allclose(topk[0], torch.full_like(topk[0], SCALING / shape.top_k))


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("name", ["flash", "tiny"])
def test_replayed_launches_of_all_token_counts(
    name: str, pdl: bool, device: torch.device, decoders: dict
) -> None:
    """200 launches in a graph, each with other inputs than the last: none may take up what an earlier one left."""
    shape, kernel = SHAPES[name], decoder(decoders, name, pdl, device)
    layers = [random_moe_layer(shape, device) for _ in range(2)]
    cases = []
    for tokens in (1, 2, 4, 8, 1, 3, 1):
        for w in layers:
            x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.float32).bfloat16()
            first = run(kernel, x, w, 0.0)
            assert rms(first, moe_reference(shape, x, w, SCALING, 0.0, 0.0)) < RMS
            cases.append((x, w, first))
    order = [cases[i % len(cases)] for i in range(200)]
    outs = [torch.empty_like(x) for x, _, _ in order]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (x, w, _), out in zip(order, outs, strict=True):
            kernel(x, w, out, SCALING, 0.0, 0.0)
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        wrong = [
            i
            for i, ((_, _, first), out) in enumerate(zip(order, outs, strict=True))
            if not torch.equal(first, out)
        ]
        assert not wrong, f"launches {wrong[:10]} gave other bits"


def test_launch_numbers_wrap(device: torch.device) -> None:
    """The count of launches goes from 2^32 - 1 to 1, as 0 marks what was never written."""
    shape = SHAPES["tiny"]
    kernel = MoEDecoder(shape, gpu_of(device), device, default_cache())
    w = random_moe_layer(shape, device)
    x = torch.randn(4, 1, shape.hidden, device=device, dtype=torch.float32).bfloat16()
    first = [run(kernel, one, w, 0.0) for one in x]
    counter = kernel._scratch[1].zero_()[:4].view(torch.int32)
    counter.fill_(-3)
    for i in range(6):
        out = kernel(x[i % 4], w, torch.full_like(x[0], torch.nan), SCALING, 0.0, 0.0)
        assert torch.equal(out, first[i % 4])
        assert counter.item() == (-2, -1, 1, 2, 3, 4)[i]


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("name", list(SHAPES))
def test_output_in_place_of_x_and_residual(
    name: str, tokens: int, device: torch.device, decoders: dict
) -> None:
    """A CTA writes its share of the output while others still compute: all must have read x by then."""
    shape, kernel = SHAPES[name], decoder(decoders, name, True, device)
    w = random_moe_layer(shape, device)
    norm = (torch.rand(shape.hidden, device=device, dtype=torch.float32).bfloat16(), 1e-6)
    for options in ({}, {"norm": norm}):
        x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.float32).bfloat16()
        apart = kernel(x, w, torch.empty_like(x), SCALING, 0.0, 0.0, residual=x, **options)
        without = kernel(x, w, torch.empty_like(x), SCALING, 0.0, 0.0, **options)
        for _ in range(50):
            both, only_x = x.clone(), x.clone()
            kernel(both, w, both, SCALING, 0.0, 0.0, residual=both, **options)
            kernel(only_x, w, only_x, SCALING, 0.0, 0.0, **options)
            assert torch.equal(both, apart) and torch.equal(only_x, without)
    assert not torch.equal(apart, without)


def test_residual_and_expert_map(device: torch.device, decoders: dict) -> None:
    shape, kernel = SHAPES["flash"], decoder(decoders, "flash", True, device)
    w = random_moe_layer(shape, device)
    x = torch.randn(3, shape.hidden, device=device, dtype=torch.float32).bfloat16()
    residual = torch.randn_like(x)
    out = run(kernel, x, w, 0.0, residual=residual)
    assert rms(out, moe_reference(shape, x, w, SCALING, 0.0, 0.0) + residual.float()) < RMS
    # Two ranks with half the experts each: their sum is the whole block and one more shared expert.
    total = torch.zeros(x.shape, device=device, dtype=torch.float32)
    half = shape.experts // 2
    for rank in range(2):
        mine = torch.full((shape.experts,), -1, device=device, dtype=torch.int32)
        mine[rank * half : (rank + 1) * half] = torch.arange(half, device=device, dtype=torch.int32)
        local = {
            name: getattr(w, name)[rank * half : (rank + 1) * half].contiguous()
            for name in ("w13", "s13", "w2", "s2")
        }
        total += run(kernel, x, dataclasses.replace(w, **local), 0.0, expert_map=mine).float()
    nobody = torch.full((shape.experts,), -1, device=device, dtype=torch.int32)
    shared = run(kernel, x, w, 0.0, expert_map=nobody).float()
    assert rms(total - shared, moe_reference(shape, x, w, SCALING, 0.0, 0.0)) < RMS


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1e4, 1e30])
def test_x_of_any_magnitude(magnitude: float, device: torch.device, decoders: dict) -> None:
    """x is multiplied as FP16 inside; a power of two per token keeps it in range, whatever the scales."""
    shape, kernel = SHAPES["tiny"], decoder(decoders, "tiny", False, device)
    w = random_moe_layer(shape, device)
    x = (torch.randn(2, shape.hidden, device=device, dtype=torch.float32) * magnitude).bfloat16()
    x[1] /= 256
    for wide in (
        w,
        dataclasses.replace(w, s13=(w.s13.float() - 60 * (1 if magnitude > 1 else -1)).clamp(1, 254).byte()),
    ):
        out, exact = run(kernel, x, wide, 4.0), moe_reference(shape, x, wide, SCALING, 4.0, 4.0)
        if exact.isfinite().all() and exact.abs().max() > 0:
            assert rms(out[:1], exact[:1]) < RMS and rms(out[1:], exact[1:]) < RMS


@pytest.mark.parametrize("name", ["flash", "flash tp2"])
def test_nan_stays_in_its_token(name: str, device: torch.device, decoders: dict) -> None:
    """One value, and a whole row: all experts of such a token compare equal, and its neighbours must not notice."""
    shape, kernel = SHAPES[name], decoder(decoders, name, True, device)
    w = random_moe_layer(shape, device)
    x = torch.randn(8, shape.hidden, device=device, dtype=torch.float32).bfloat16()
    exact = moe_reference(shape, x, w, SCALING, 0.0, 0.0)
    x[2, 7], x[6] = torch.nan, torch.nan
    out = torch.empty_like(x)
    kernel(x, w, out, SCALING, 0.0, 0.0)
    assert out[2].isnan().any() and out[6].isnan().all()
    keep = [0, 1, 3, 4, 5, 7]
    assert rms(out[keep], exact[keep]) < RMS


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("rows", "k"), [(20480, 2560), (2560, 4096), (1024, 256), (1008, 384), (1000, 256)])
@pytest.mark.parametrize("row_scales", [False, True], ids=["block scales", "row scales"])
def test_gemv(rows: int, k: int, row_scales: bool, tokens: int, device: torch.device) -> None:
    shape = GemvShape(rows, k, row_scales)
    if rows % 16 and not row_scales:
        with pytest.raises(ValueError, match="multiple of 16"):
            Fp8Gemv(shape, gpu_of(device), device, default_cache())
        return
    weight, scale = random_fp8(rows, k, device)
    x = torch.randn(tokens, k, device=device, dtype=torch.float32).bfloat16()
    if row_scales:
        scale = torch.rand(rows, device=device, dtype=torch.float32) * 1e-3
        exact = (x.float() @ weight.float().T) * scale
    else:
        exact = x.float() @ dequantize_block_fp8(weight, scale).T
    kernel, outs = Fp8Gemv(shape, gpu_of(device), device, default_cache()), []
    for _ in range(3):
        outs.append(torch.full((tokens, rows), torch.nan, device=device, dtype=torch.bfloat16))
        kernel(x, weight, scale, outs[-1])
    assert rms(outs[0], exact) < RMS and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert rms(outs[0], exact * torch.linspace(0.9, 1.1, rows, device=device, dtype=torch.float32)) > RMS
    if row_scales:
        argmax = Fp8Gemv(GemvShape(rows, k, True, argmax=True), gpu_of(device), device, default_cache())
        for _ in range(3):
            ids = torch.full((tokens,), -1, device=device, dtype=torch.int64)
            argmax(x, weight, scale, ids)
            assert ids.tolist() == outs[0].float().argmax(-1).tolist()


def test_every_code(device: torch.device) -> None:
    """All 256 E4M3 bytes (NaN aside) and all 16 E2M1 codes come out as in the codecs."""
    rows, k = 256, 128
    codes = torch.arange(256, device=device, dtype=torch.uint8)
    codes[[127, 255]] = 0
    weight = codes.repeat(k, 1).T.contiguous().view(torch.float8_e4m3fn)
    x = torch.zeros(1, k, device=device, dtype=torch.bfloat16)
    x[0, 77] = 1
    out = torch.empty(1, rows, device=device, dtype=torch.bfloat16)
    Fp8Gemv(GemvShape(rows, k, True), gpu_of(device), device, default_cache())(
        x, weight, torch.ones(rows, device=device, dtype=torch.float32), out
    )
    assert torch.equal(out[0].float(), weight[:, 77].float())
