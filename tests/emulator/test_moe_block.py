# SPDX-License-Identifier: Apache-2.0
"""The MoE block in the emulator against fp32 on the same bytes: RMS error at most 5e-3, as on a GPU."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.emulator.common import CPU, gpu_with, normal, same_bits
from tests.emulator.emulator import Emulator
from tests.relative_error import rms
from vllm_ling.bench.layers import random_moe_layer
from vllm_ling.decode.reference import rms_norm
from vllm_ling.quant.decode_moe import MoEDecoder, MoEShape, MoEWeights
from vllm_ling.quant.moe_reference import moe_reference, route

RMS = 5e-3
SCALING = 2.5
TINY = MoEShape(hidden=256, intermediate=128, experts=32, top_k=4, groups=4, top_groups=2)
# Shape, SMs and shared memory in KiB: the latter decides on the warps, and whether all activations fit at once.
CARDS = {
    "tiny": (TINY, 5, 48),
    "more CTAs than experts": (TINY, 60, 48),
    "odd, activations in rounds": (
        MoEShape(hidden=640, intermediate=384, experts=96, top_k=6, groups=3, top_groups=2, gate_bf16=True),
        *(7, 99),
    ),
    "one group, wide shared expert": (
        MoEShape(
            hidden=1024,
            intermediate=256,
            experts=64,
            top_k=2,
            groups=1,
            top_groups=1,
            shared_intermediate=512,
        ),
        *(5, 227),
    ),
    "top-15 of small groups": (
        MoEShape(hidden=128, intermediate=128, experts=64, top_k=15, groups=8, top_groups=4),
        *(5, 99),
    ),
    "512 experts": (
        MoEShape(hidden=128, intermediate=128, experts=512, top_k=8, groups=8, top_groups=4),
        *(9, 48),
    ),
}
DECODERS: dict[str, MoEDecoder] = {}


def new_decoder(name: str) -> MoEDecoder:
    shape, sms, shared = CARDS[name]
    made = MoEDecoder(shape, gpu_with(sms, shared), CPU, None)
    for tokens, scratch in made._scratch.items():  # CUDA's allocations begin at multiples of 256
        roomy = torch.zeros(len(scratch) + 256, dtype=torch.uint8)
        made._scratch[tokens] = roomy[-roomy.data_ptr() % 256 :][: len(scratch)]
    return made


def decoder(name: str) -> MoEDecoder:
    if name not in DECODERS:
        DECODERS[name] = new_decoder(name)
    return DECODERS[name]


def run(
    emulator: Emulator,
    kernel: MoEDecoder,
    x: torch.Tensor,
    w: MoEWeights,
    limit: float = 0.0,
    residual: torch.Tensor | None = None,
    in_place: bool = False,
    times: int = 3,
    **options: Any,
) -> torch.Tensor:
    """Launches under different schedules, which must agree to the bit; `in_place`: out is x and the residual."""

    def once(early: bool) -> torch.Tensor:
        mine = x.clone()
        added = mine if in_place else residual
        out = mine if in_place else torch.full_like(x, torch.nan)
        with emulator.starts(early, mine):
            kernel(mine, w, out, SCALING, limit, limit, residual=added, **options)
        return out

    return same_bits(once, times)


@pytest.mark.parametrize(
    ("name", "tokens", "limit"),
    [
        ("tiny", 1, 0.0),
        ("tiny", 4, 0.5),
        ("more CTAs than experts", 1, 0.5),
        ("more CTAs than experts", 3, 0.0),
        ("odd, activations in rounds", 1, 0.0),
        ("odd, activations in rounds", 4, 0.5),
        ("one group, wide shared expert", 2, 0.5),
        ("top-15 of small groups", 7, 0.0),
        ("512 experts", 2, 0.0),
    ],
)
def test_block(name: str, tokens: int, limit: float, emulator: Emulator) -> None:
    kernel = decoder(name)
    shape, w = kernel.shape, random_moe_layer(kernel.shape, CPU)
    x = normal(tokens, shape.hidden).bfloat16()
    if tokens == 4:
        x[1] = x[0]  # two tokens with the same experts
    topk = torch.empty(tokens, shape.top_k), torch.empty(tokens, shape.top_k, dtype=torch.int32)
    out = run(emulator, kernel, x, w, limit, topk=topk)

    def exact(weights: MoEWeights, clamp: float, of: MoEShape = shape) -> torch.Tensor:
        return moe_reference(of, x, weights, SCALING, clamp, limit)

    assert rms(out, exact(w, limit)) < RMS
    weights, ids = route(shape, x, w, SCALING)
    assert torch.equal(topk[1].long(), ids) and torch.allclose(topk[0], weights, rtol=1e-4)
    assert rms(out, exact(w, 0.0 if limit else 0.5)) > RMS
    assert rms(out, exact(w, limit, dataclasses.replace(shape, top_k=shape.top_k - 1))) > RMS
    assert rms(out, exact(dataclasses.replace(w, s2=w.s2 + 1), limit)) > RMS
    assert rms(out, exact(dataclasses.replace(w, shared_s2=w.shared_s2 * 0), limit)) > RMS


@pytest.mark.parametrize(("name", "tokens"), [("tiny", 4), ("odd, activations in rounds", 4)])
def test_all_tokens_on_the_same_experts(name: str, tokens: int, emulator: Emulator) -> None:
    kernel = decoder(name)
    w, x = random_moe_layer(kernel.shape, CPU), normal(1, kernel.shape.hidden).bfloat16().repeat(tokens, 1)
    out = run(emulator, kernel, x, w)
    assert rms(out, moe_reference(kernel.shape, x, w, SCALING, 0.0, 0.0)) < RMS
    assert torch.equal(out, out[:1].repeat(tokens, 1)), "equal tokens, different outputs"


@pytest.mark.parametrize("name", ["tiny", "512 experts"])
def test_ties_go_to_the_lower_expert_and_group(name: str, emulator: Emulator) -> None:
    kernel = decoder(name)
    shape, w = kernel.shape, random_moe_layer(kernel.shape, CPU)
    x = normal(2, shape.hidden).bfloat16()
    for bias in (torch.zeros(shape.experts), (normal(shape.experts) * 3).round() / 4):
        flat = dataclasses.replace(w, gate=torch.zeros_like(w.gate), bias=bias)
        topk = torch.empty(2, shape.top_k), torch.empty(2, shape.top_k, dtype=torch.int32)
        run(emulator, kernel, x, flat, topk=topk, times=2)
        scores = (bias + 0.5).view(shape.groups, -1)
        groups = scores.topk(2).values.sum(-1).sort(descending=True, stable=True).indices[: shape.top_groups]
        kept = torch.full_like(scores, -1e30)
        kept[groups] = scores[groups]
        best = kept.flatten().sort(descending=True, stable=True).indices[: shape.top_k]
        assert topk[1].tolist() == [best.tolist()] * 2


def test_norm_and_residual_in_place(emulator: Emulator) -> None:
    kernel = decoder("tiny")
    w, x = random_moe_layer(kernel.shape, CPU), normal(3, kernel.shape.hidden, scale=5).bfloat16()
    norm = (1 + normal(kernel.shape.hidden, scale=0.1)).bfloat16()
    normed = (rms_norm(x, torch.ones_like(norm), 1e-6).bfloat16() * norm).bfloat16()
    out = run(emulator, kernel, x, w, in_place=True, norm=(norm, 1e-6))
    assert rms(out, moe_reference(kernel.shape, normed, w, SCALING, 0.0, 0.0) + x.float()) < RMS
    assert rms(out, moe_reference(kernel.shape, x, w, SCALING, 0.0, 0.0) + x.float()) > RMS
    residual = normal(3, kernel.shape.hidden).bfloat16()
    added = run(emulator, kernel, x, w, residual=residual)
    assert rms(added, moe_reference(kernel.shape, x, w, SCALING, 0.0, 0.0) + residual.float()) < RMS


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_expert_map(share: float, emulator: Emulator) -> None:
    """A rank has some of the experts, in any order, or none."""
    kernel = decoder("tiny")
    w, x = random_moe_layer(kernel.shape, CPU), normal(4, kernel.shape.hidden).bfloat16()
    count = int(share * kernel.shape.experts)
    order = torch.randperm(kernel.shape.experts)[:count]
    places = torch.full((kernel.shape.experts,), -1, dtype=torch.int32)
    places[order] = torch.arange(count, dtype=torch.int32)
    held = {name: getattr(w, name)[order].contiguous() for name in ("w13", "s13", "w2", "s2")}
    out = run(emulator, kernel, x, dataclasses.replace(w, **held), expert_map=places)
    missing = w.w2.clone()
    missing[places < 0] = 0  # what is not here adds nothing
    assert (
        rms(out, moe_reference(kernel.shape, x, dataclasses.replace(w, w2=missing), SCALING, 0.0, 0.0)) < RMS
    )
    assert rms(out, moe_reference(kernel.shape, x, w, SCALING, 0.0, 0.0)) > RMS


@pytest.mark.parametrize(("name", "rows"), [("tiny", 4), ("512 experts", 2)])
def test_nan_stays_in_its_token(name: str, rows: int, emulator: Emulator) -> None:
    """One value, and a whole row: all experts of such a token compare equal, and its neighbours must not notice."""
    kernel = decoder(name)
    w, x = random_moe_layer(kernel.shape, CPU), normal(rows, kernel.shape.hidden).bfloat16()
    exact = moe_reference(kernel.shape, x, w, SCALING, 0.0, 0.0)
    x[1, 7] = torch.nan
    x[3:] = torch.nan
    topk = (
        torch.empty(rows, kernel.shape.top_k),
        torch.full((rows, kernel.shape.top_k), -7, dtype=torch.int32),
    )
    out = run(emulator, kernel, x, w, topk=topk)
    assert out[1].isnan().any() and out[3:].isnan().all()
    assert ((topk[1] >= 0) & (topk[1] < kernel.shape.experts)).all()
    for row in range(0, rows, 2):
        assert rms(out[row], exact[row]) < RMS


def test_tags_wrap(emulator: Emulator) -> None:
    """The launch's number goes past 2^32 - 1 to 1, as 0 means never written."""
    kernel = decoder("tiny")
    w, x = random_moe_layer(kernel.shape, CPU), normal(1, kernel.shape.hidden).bfloat16()
    words = kernel._scratch[1].view(torch.int32)
    words[0] = -3
    run(emulator, kernel, x, w, times=4)
    assert int(words[0]) == 2
    used = words[words != 0]
    assert set(used[used.abs() < 10].tolist()) == {2}, (
        "the last launch wrote all words that the others had written"
    )


def test_launches_follow_each_other(emulator: Emulator) -> None:
    """The second starts early, reads what the first writes, and shares its scratch."""
    kernel = decoder("tiny")
    w, x = random_moe_layer(kernel.shape, CPU), normal(2, kernel.shape.hidden).bfloat16()
    between, apart = run(emulator, kernel, x, w), torch.full_like(x, torch.nan)
    kernel(between, w, apart, SCALING, 0.0, 0.0)
    for _ in range(3):
        first, second = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        with emulator.starts(True, x):
            kernel(x, w, first, SCALING, 0.0, 0.0)
            kernel(first, w, second, SCALING, 0.0, 0.0)
        assert torch.equal(first, between) and torch.equal(second, apart)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_x_of_any_magnitude(magnitude: float, emulator: Emulator) -> None:
    """x is multiplied as FP16 inside; a power of two per token keeps it in range, whatever the scales."""
    kernel = decoder("tiny")
    shift = 60 if magnitude > 1 else -60
    w = random_moe_layer(kernel.shape, CPU, (117 - shift, 122 - shift))
    x = normal(2, kernel.shape.hidden, scale=magnitude).bfloat16()
    x[1] /= 256
    exact = moe_reference(kernel.shape, x, w, SCALING, 4.0, 4.0)
    out = run(emulator, kernel, x, w, 4.0)
    assert exact.isfinite().all() and rms(out[:1], exact[:1]) < RMS and rms(out[1:], exact[1:]) < RMS


FAULTS = {
    "a reader does not look at the tag": ("return tag() ^ want;", "return 0;"),
    "the tag is always the same": ("return epoch + 1 ? epoch + 1 : 1;", "return 1;"),
    "a CTA's sums come without a tag": (
        "__float_as_uint(sum), tag);\n      }\n    }\n    if ((unit + 1)",
        "__float_as_uint(sum), 0);\n      }\n    }\n    if ((unit + 1)",
    ),
    "a slot is used before it is there": ("wait_copies<STAGES - 1>();", "wait_copies<STAGES>();"),
    "CTAs without logits do not say that they are here": ("first < WARPS && sign(i) < HERE", "false"),
    "x is staged before it is there": ("  wait_for_producer();\n  uint32_t epoch", "  uint32_t epoch"),
    "sums are stored before all warps have theirs": (
        "store_sums(s.sums, acc[1], 64);\n    __syncthreads();",
        "store_sums(s.sums, acc[1], 64);",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, emulator: Emulator) -> None:
    with emulator.fault(*FAULTS[fault]), pytest.raises(AssertionError):
        kernel = new_decoder("more CTAs than experts")
        w = random_moe_layer(kernel.shape, CPU)
        for _ in range(4):
            x = normal(1, kernel.shape.hidden).bfloat16()
            out = run(emulator, kernel, x, w, in_place=True)
            assert rms(out, moe_reference(kernel.shape, x, w, SCALING, 0.0, 0.0) + x.float()) < RMS
