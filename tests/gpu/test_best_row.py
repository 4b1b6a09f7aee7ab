# SPDX-License-Identifier: Apache-2.0
"""The FP8 product that gives the row of the largest logit: that of the logits which the kernel writes otherwise."""

import pytest
import torch

from vllm_ling.bench.layers import random_fp8
from vllm_ling.quant.fp8_gemv import Fp8Gemv, GemvShape
from vllm_ling.quant.jit import default_cache, gpu_of

pytestmark = pytest.mark.gpu
SIZES = {"head": (157184, 2560), "few rows": (1000, 256), "split": (1008, 1280)}
Head = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    torch.zeros(1, device="cuda", dtype=torch.float32)  # creates the context that the driver API needs
    torch.manual_seed(0)
    return torch.device("cuda")


def kernel(name: str, argmax: bool, pdl: bool, device: torch.device) -> Fp8Gemv:
    rows, k = SIZES[name]
    return Fp8Gemv(GemvShape(rows, k, True, argmax=argmax), gpu_of(device), device, default_cache(), pdl)


def head(name: str, device: torch.device) -> Head:
    rows, k = SIZES[name]
    return random_fp8(rows, k, device)[0], torch.rand(rows, device=device, dtype=torch.float32) * 1e-3


def inputs(name: str, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, SIZES[name][1], device=device, dtype=torch.float32).bfloat16()


def right(product: Fp8Gemv, x: torch.Tensor, of: Head) -> torch.Tensor:
    out = torch.empty(x.shape[0], product.shape.rows, device=x.device, dtype=torch.bfloat16)
    return product(x, *of, out).float().argmax(-1)


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("name", SIZES)
def test_replayed_launches_of_all_token_counts(name: str, pdl: bool, device: torch.device) -> None:
    """200 launches in a graph, each with other inputs than the last; their numbers go past 2^32 - 1 on the way."""
    best, product = kernel(name, True, pdl, device), kernel(name, False, pdl, device)
    heads, cases = [head(name, device) for _ in range(2)], []
    for i, tokens in enumerate((1, 2, 4, 8, 16, 1, 9, 3, 1)):
        x = inputs(name, tokens, device)
        cases.append((x, heads[i % 2], right(product, x, heads[i % 2])))
    order = [cases[i % len(cases)] for i in range(200)]
    outs = [torch.empty_like(ids) for _, _, ids in order]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (x, of, _), out in zip(order, outs, strict=True):
            best(x, *of, out)
    epoch = best._exchange[:4].view(torch.int32).fill_(-300)
    for replay in range(3):
        for out in outs:
            out.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        wrong = [i for i in range(200) if not torch.equal(outs[i], order[i][2])]
        assert not wrong, f"launches {wrong[:10]} found other rows"
        assert epoch.item() == (-100, 101, 301)[replay]  # there is no 0


def test_two_kernels_on_two_streams(device: torch.device) -> None:
    """Each has an exchange of its own."""
    of, streams = head("head", device), [torch.cuda.Stream(device) for _ in range(2)]
    kernels, product = (
        [kernel("head", True, True, device) for _ in streams],
        kernel("head", False, True, device),
    )
    given = [[inputs("head", 1 + i % 4, device) for i in range(20)] for _ in streams]
    wanted = [[right(product, x, of) for x in some] for some in given]
    outs = [[torch.full_like(ids, -1) for ids in some] for some in wanted]
    torch.cuda.synchronize()
    for i in range(20):
        for own, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                kernels[own](given[own][i], *of, outs[own][i])
    torch.cuda.synchronize()
    for found, expected in zip(outs, wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
