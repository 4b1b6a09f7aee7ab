# SPDX-License-Identifier: Apache-2.0
"""The fused path's kernels against fp32 references: RMS error at most 5e-3 (outputs are rounded to BF16: 1.7e-3)."""

import copy
import dataclasses

import pytest
import torch

from tests.relative_error import rms
from vllm_ling.bench.chain import Chain, random_kda
from vllm_ling.bench.layers import FLASH, random_fp8
from vllm_ling.decode.kda_step import KdaBatch, KdaShape, KdaStates, KdaStep
from vllm_ling.decode.layers import KdaLayer, MoELayer, Projection
from vllm_ling.decode.mla_prepare import MlaInputs, MlaPrepare, MlaShape, MlaWeights
from vllm_ling.decode.reference import kda_step_reference, mla_prepare_reference, rms_norm
from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.decode_moe import MoEDecoder
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape, Prologue
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.moe_reference import moe_reference

pytestmark = pytest.mark.gpu
RMS = 5e-3
KDA = KdaShape(heads=4, hidden=640)
MLA = MlaShape(heads=8, hidden=512)


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    torch.zeros(1, device="cuda", dtype=torch.float32)  # creates the context that the driver API needs
    torch.manual_seed(0)
    return torch.device("cuda")


def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.float32) * scale


@pytest.fixture(scope="module")
def steps(device: torch.device) -> dict[tuple[bool, bool], KdaStep]:
    gpu = gpu_of(device)
    return {
        (safe, pdl): KdaStep(dataclasses.replace(KDA, safe_gate=safe), gpu, default_cache(), pdl)
        for safe in (True,)
        for pdl in (False, True)
    }


def states(device: torch.device, dim_first: bool) -> KdaStates:
    wide = 3 * KDA.heads * 128
    conv = normal(12, wide, 10).bfloat16() if dim_first else normal(12, 10, wide).bfloat16().mT
    return KdaStates(conv, normal(12, KDA.heads, 128, 128, scale=0.3))


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


BATCHES = {
    "one": lambda: (KdaBatch(integers(3)), 1),
    "three and a padded one": lambda: (KdaBatch(integers(5, 2, 0, 7)), 4),
    "verify 4 after 1": lambda: (
        KdaBatch(integers(2, 3, 4, 5)[None], integers(0, 4), integers(1), 4),
        4,
    ),
    "verify 4 after 3": lambda: (
        KdaBatch(integers(2, 3, 4, 5)[None], integers(0, 4), integers(3), 4),
        4,
    ),
    "two verifications of 2 and 4 and a padded one": lambda: (
        KdaBatch(
            torch.stack([integers(1, 2, 3, 4), integers(8, 7, 6, 5), integers(0, 0, 0, 0)]),
            integers(0, 2, 6, 6),
            integers(2, 4, 1),
            4,
        ),
        6,
    ),
    "verify 8 after 8": lambda: (
        KdaBatch(integers(1, 2, 3, 4, 5, 6, 7, 8)[None], integers(0, 8), integers(8), 8),
        8,
    ),
}


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("dim_first", [False, True], ids=["token rows", "channel rows"])
@pytest.mark.parametrize("name", list(BATCHES))
def test_kda_step(name: str, dim_first: bool, pdl: bool, device: torch.device, steps: dict) -> None:
    batch, tokens = BATCHES[name]()
    w = random_kda(KDA, device)
    pool = states(device, dim_first)
    if batch.accepted is not None and int(batch.accepted.max()) == 8:
        pool = KdaStates(normal(12, 3 * KDA.heads * 128, 10).bfloat16(), pool.recurrent)
    projected, normed = normal(tokens, 5 * KDA.heads * 128).bfloat16(), normal(tokens, KDA.hidden).bfloat16()
    exact_pool, before = copy.deepcopy(pool), copy.deepcopy(pool)
    exact = kda_step_reference(KDA, projected, normed, w, exact_pool, batch)
    out = torch.full((tokens, KDA.heads * 128), torch.nan, device=device, dtype=torch.bfloat16)
    steps[True, pdl](projected, normed, w, pool, batch, out)
    assert rms(out, exact) < RMS
    assert torch.equal(pool.conv, exact_pool.conv)
    assert rms(pool.recurrent, exact_pool.recurrent) < 1e-5, "float32 states, another order of sums"
    untouched = [slot for slot in range(12) if slot not in batch.slots.flatten().tolist() or slot == 0]
    assert torch.equal(pool.recurrent[untouched], before.recurrent[untouched])
    for change in ({"q_conv": w.k_conv}, {"b": -w.b}, {"a_log": w.a_log + 1}, {"o_norm": w.o_norm.flip(0)}):
        wrong = kda_step_reference(
            KDA, projected, normed, dataclasses.replace(w, **change), copy.deepcopy(before), batch
        )
        assert rms(out, wrong) > RMS, change


def test_kda_steps_follow_each_other(device: torch.device, steps: dict) -> None:
    """Twenty verifications of four tokens with changing acceptance against the same tokens one at a time."""
    w, wide = random_kda(KDA, device), KDA.heads * 128
    spec, plain = states(device, False), states(device, False)
    spec.conv.zero_(), plain.conv.zero_(), spec.recurrent.zero_(), plain.recurrent.zero_()
    tokens = normal(40, 5 * wide).bfloat16()
    normed = normal(40, KDA.hidden).bfloat16()
    expected = torch.empty(40, wide, device=device, dtype=torch.bfloat16)
    for n in range(40):
        steps[True, True](
            tokens[n : n + 1], normed[n : n + 1], w, plain, KdaBatch(integers(1)), expected[n : n + 1]
        )
    at, accepted, out = 0, 1, torch.empty(4, wide, device=device, dtype=torch.bfloat16)
    while at + 4 <= 40:
        batch = KdaBatch(integers(2, 3, 4, 5)[None], integers(0, 4), integers(accepted), 4)
        steps[True, True](tokens[at : at + 4], normed[at : at + 4], w, spec, batch, out)
        assert torch.equal(out, expected[at : at + 4]), f"tokens {at} to {at + 3}"
        accepted = 1 + (at * 7 + 3) % 4
        at += accepted


@pytest.mark.parametrize("shape", [MLA, MlaShape(heads=32, hidden=2560)], ids=["small", "flash"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_mla_prepare(tokens: int, shape: MlaShape, device: torch.device) -> None:
    w = MlaWeights(
        latent_norm=(1 + normal(512, scale=0.1)).bfloat16(),
        gate=normal(shape.heads, shape.hidden, scale=0.05).bfloat16(),
        cos_sin=normal(100, 64).clamp(-1, 1).bfloat16(),
        eps=1e-6,
    )
    projected, normed = (
        normal(tokens, sum(shape.projected)).bfloat16(),
        normal(tokens, shape.hidden).bfloat16(),
    )
    positions = torch.randint(0, 100, (tokens,), device=device)
    exact = mla_prepare_reference(shape, projected, normed, positions, w)
    ours = MlaInputs(
        *(
            torch.full(t.shape, torch.nan, device=device, dtype=torch.bfloat16)
            for t in (exact.query, exact.latent, exact.key)
        ),
        torch.full(exact.gate.shape, torch.nan, device=device, dtype=torch.float32),
    )
    MlaPrepare(shape, gpu_of(device), default_cache())(projected, normed, positions, w, ours)
    moved = mla_prepare_reference(shape, projected, normed, (positions + 1) % 100, w)
    for name in ("query", "latent", "key", "gate"):
        assert rms(getattr(ours, name), getattr(exact, name)) < RMS, name
    for name in ("query", "key"):
        assert rms(getattr(ours, name), getattr(moved, name)) > RMS, name


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("prologue", ["norm", "swiglu", "gated"])
@pytest.mark.parametrize(
    ("parts", "k"),
    [((12288, 4096, 4096), 2560), ((6144, 576), 2560), ((2560,), 4096), ((2560,), 6144), ((384, 144), 640)],
)
def test_gemv_prologues(
    parts: tuple[int, ...], k: int, prologue: Prologue, tokens: int, device: torch.device
) -> None:
    shape = GemvShape(sum(parts), k, False, prologue=prologue, parts=parts)
    kernel = Fp8Gemv(shape, gpu_of(device), device, default_cache())
    made = [random_fp8(rows, k, device) for rows in parts]
    weights, scales = [w for w, _ in made], [s for _, s in made]
    dense = torch.cat([dequantize_block_fp8(w, s) for w, s in made])
    x = (normal(tokens, k * (2 if prologue == "swiglu" else 1)) * 3).bfloat16()
    norm = ((1 + normal(k, scale=0.1)).bfloat16(), 1e-6)
    factors = torch.rand(tokens, k // 128, device=device, dtype=torch.float32)
    residual = normal(tokens, shape.rows, scale=2).bfloat16()
    inputs = {
        "norm": lambda: rms_norm(x, *norm),
        "swiglu": lambda: torch.nn.functional.silu(x[:, :k].float()) * x[:, k:].float(),
        "gated": lambda: x.float() * factors.repeat_interleave(128, -1),
    }[prologue]()
    exact = inputs @ dense.T + residual.float()
    normed = torch.full((tokens, k), torch.nan, device=device, dtype=torch.bfloat16)
    out = residual.clone()
    kernel(x, weights, scales, out, residual=out, norm=norm, normed=normed, factors=factors)
    assert rms(out, exact) < RMS
    assert rms(out, x[:, :k].float() @ dense.T + residual.float()) > RMS
    if prologue == "norm":
        assert rms(normed, inputs) < RMS
    if len(parts) > 1:
        swapped = torch.cat([dense[parts[0] :], dense[: parts[0]]])
        assert rms(out, inputs @ swapped.T + residual.float()) > RMS


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("rows", "k"), [(2560, 5120), (384, 768)])
def test_gemv_joins_two_norms(rows: int, k: int, tokens: int, device: torch.device) -> None:
    shape = GemvShape(rows, k, False, prologue="joined")
    kernel = Fp8Gemv(shape, gpu_of(device), device, default_cache())
    weight, scales = random_fp8(rows, k, device)
    left, right = (normal(tokens, k // 2, scale=scale).bfloat16() for scale in (3, 0.2))
    norms = [(1 + normal(k // 2, scale=0.1)).bfloat16() for _ in range(2)]
    dense = dequantize_block_fp8(weight, scales)
    out = torch.full((tokens, rows), torch.nan, device=device, dtype=torch.bfloat16)
    kernel(left, weight, scales, out, norm=(norms[0], 1e-6), second=(right, norms[1]))
    halves = [rms_norm(x, norm, 1e-6) for x, norm in ((left, norms[0]), (right, norms[1]))]
    assert rms(out, torch.cat(halves, -1) @ dense.T) < RMS
    assert rms(out, torch.cat(halves[::-1], -1) @ dense.T) > RMS
    swapped = [rms_norm(x, norm, 1e-6) for x, norm in ((left, norms[1]), (right, norms[0]))]
    assert rms(out, torch.cat(swapped, -1) @ dense.T) > RMS


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_moe_block_with_norm_in_place(tokens: int, device: torch.device) -> None:
    from vllm_ling.bench.layers import random_moe_layer
    from vllm_ling.quant.decode_moe import MoEShape

    shape = MoEShape(hidden=640, intermediate=384, experts=96, top_k=6, groups=3, top_groups=2)
    decoder, w = MoEDecoder(shape, gpu_of(device), device, default_cache()), random_moe_layer(shape, device)
    x = (normal(tokens, shape.hidden) * 5).bfloat16()
    weight = (1 + normal(shape.hidden, scale=0.1)).bfloat16()
    # The kernel rounds the normalized x to BF16, and the router decides on that.
    normed = (rms_norm(x, torch.ones_like(weight), 1e-6).bfloat16() * weight).bfloat16()
    exact = moe_reference(shape, normed, w, 2.5, 0.0, 0.0) + x.float()
    out = x.clone()
    decoder(out, w, out, 2.5, 0.0, 0.0, residual=out, norm=(weight, 1e-6))
    assert rms(out, exact) < RMS
    assert rms(out, moe_reference(shape, x, w, 2.5, 0.0, 0.0) + x.float()) > RMS


def dense(projection: Projection) -> torch.Tensor:
    parts = zip(projection.weight, projection.scales, strict=True)
    return torch.cat([dequantize_block_fp8(weight, scales) for weight, scales in parts])


def restore(chain: Chain, states: list[KdaStates]) -> None:
    for layer, kept in zip(chain.layers, states, strict=True):
        assert isinstance(layer.attention, KdaLayer)
        mine = layer.attention.states()
        mine.conv.copy_(kept.conv), mine.recurrent.copy_(kept.recurrent)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_layers_of_flash_against_the_reference(tokens: int, device: torch.device) -> None:
    """Two layers at full size: each half against fp32 on the stream that it was given, then all without a pause.

    Halves, as the router may turn on the last bit of a stream; what one launch writes, the next must see.
    """
    chain, x = Chain(2, device), normal(tokens, 2560).bfloat16()
    for layer in chain.layers:
        assert isinstance(layer.attention, KdaLayer)
        layer.attention.states().conv.copy_(normal(18, 3 * 4096, 6))
        layer.attention.states().recurrent.copy_(normal(18, 32, 128, 128, scale=0.3))
    batches, stream = chain.batch(tokens), x.clone()
    before = [copy.deepcopy(layer.attention.states()) for layer in chain.layers]
    start = copy.deepcopy(before)
    for layer, kept in zip(chain.layers, before, strict=True):
        kda, moe, given = layer.attention, layer.mlp, stream.clone()
        assert isinstance(kda, KdaLayer) and isinstance(moe, MoELayer)
        kda(stream, chain.space, batches)
        normed = rms_norm(given, *kda.norm).bfloat16()
        projected = (normed.float() @ dense(kda.in_proj).T).bfloat16()
        exact = kda_step_reference(kda.step.shape, projected, normed, kda.weights, kept, batches[kda.name])
        exact = exact.bfloat16().float() @ dense(kda.out_proj).T
        # The stream is rounded to BF16 and about as large as what is added.
        assert rms(stream.float() - given.float(), exact) < 2 * RMS < rms(stream, given)
        assert (
            rms(kda.states().recurrent, kept.recurrent) < 2 * RMS and rms(kda.states().conv, kept.conv) < RMS
        )
        given = stream.clone()
        moe(stream, chain.space)
        normed = rms_norm(given, *moe.norm).bfloat16()
        exact = moe_reference(FLASH, normed, moe.weights(), moe.scaling, 0.0, 0.0)
        assert rms(stream.float() - given.float(), exact) < 2 * RMS < rms(stream, given)
    positions = torch.zeros(tokens, device=device, dtype=torch.int64)
    for pauses in (True, False):
        restore(chain, start)
        chain.body.taps = {} if pauses else None
        assert torch.equal(chain.body(x.clone(), positions, batches), stream), f"pauses: {pauses}"


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_chain_in_a_graph_repeats_to_the_bit(tokens: int, device: torch.device) -> None:
    """Programmatic launches and prefetches over two layers: the same bits eagerly and in every replay."""
    chain = Chain(2, device)
    x = normal(tokens, 2560).bfloat16()
    positions, batch = torch.zeros(tokens, device=device, dtype=torch.int64), chain.batch(tokens)
    pools = [layer.attention.states() for layer in chain.layers]

    def reset() -> torch.Tensor:
        for pool in pools:
            pool.conv.fill_(0.1), pool.recurrent.fill_(0.01)
        return x.clone()

    expected = chain.body(reset(), positions, batch).clone()
    assert expected.isfinite().all()
    held = reset()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        chain.body(held, positions, batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chain.body(held, positions, batch)
        for _ in range(20):
            held.copy_(reset())
            graph.replay()
            assert torch.equal(held, expected)
