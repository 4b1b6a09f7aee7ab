# SPDX-License-Identifier: Apache-2.0
"""MLA in the latent space against fp32 on the same weights and cache: RMS error at most 1e-2.

Above the 5e-3 of single kernels, as the query, the weights of the keys and the cache's new rows are rounded to BF16 on
the way, 2e-3 each; on scores of unit variance a rounded query moves every weight.
"""

import dataclasses

import pytest
import torch

from tests.gpu.mla_case import Case
from tests.relative_error import rms
from vllm_ling.decode.mla_attention import MlaAttention
from vllm_ling.decode.mla_prepare import MlaShape
from vllm_ling.quant.jit import Gpu, default_cache, gpu_of

pytestmark = pytest.mark.gpu
RMS = 1e-2
FLASH, SMALL = MlaShape(heads=32, hidden=2560), MlaShape(heads=8, hidden=512, latent=256)
SHAPES = {"flash": FLASH, "small": SMALL}
KERNELS: dict[tuple[MlaShape, bool, bool, int], MlaAttention] = {}


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    torch.zeros(1, device="cuda", dtype=torch.float32)  # creates the context that the driver API needs
    torch.manual_seed(0)
    return torch.device("cuda")


def kernel_of(shape: MlaShape, contiguous: bool, pdl: bool = True, shared: int = 0) -> MlaAttention:
    """`shared`: plans as for a GPU with that many bytes of shared memory."""
    key = shape, contiguous, pdl, shared
    if key not in KERNELS:
        device = torch.device("cuda")
        gpu = gpu_of(device)
        gpu = dataclasses.replace(gpu, shared_bytes=shared) if shared else gpu
        KERNELS[key] = MlaAttention(shape, contiguous, gpu, device, default_cache(), pdl)
    return KERNELS[key]


BATCHES = {
    "one key": ([(1, 1)], 0),
    "one tile": ([(32, 1)], 0),
    "a key more": ([(33, 1)], 0),
    "two splits": ([(128, 1)], 0),
    "1,000 keys": ([(1000, 1)], 0),
    "10,000 keys": ([(10_000, 1)], 0),
    "verify 4 of 4": ([(4, 4)], 0),
    "verify 4 across a tile": ([(34, 4)], 0),
    "verify 4 of 1,500": ([(1500, 4)], 0),
    "verify 8": ([(3000, 8)], 0),
    "three sequences and padding": ([(5, 1), (700, 1), (64, 1)], 1),
    "verify 2 and 3 and padding": ([(130, 2), (41, 3)], 3),
}


@pytest.mark.parametrize("contiguous", [False, True], ids=["latent columns", "latent rows"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BATCHES)
def test_attention(name: str, shape: MlaShape, contiguous: bool, device: torch.device) -> None:
    case = Case(shape, contiguous, *BATCHES[name])
    right, ours = case.copy(), case.copy()
    exact = case.exact(right)
    gate, out = case.outputs()
    case.run(kernel_of(shape, contiguous), ours, gate, out)
    real = case.tokens - case.padding
    assert rms(out[:real], exact[:real]) < RMS
    assert not out[real:].any(), "tokens of no sequence give zeros"
    assert rms(gate, (case.normed.float() @ case.weights.gate.float().T).sigmoid()) < 1e-5
    written = [(int(slot) // 48, int(slot) % 48) for slot in case.batch.slots.tolist() if slot >= 0]
    for block, row in written:
        assert rms(ours.cache[block, row], right.cache[block, row]) < RMS
        ours.cache[block, row] = case.batch.cache[block, row]
    assert torch.equal(ours.cache.view(torch.int16), case.batch.cache.view(torch.int16)), (
        "other rows are left alone"
    )

    lengths = case.batch.lengths
    if int(lengths.max()) > 1:  # one key has all the weight, whatever the query
        wrong = case.exact(case.copy(), positions=(case.positions + 1) % 4096)
        assert rms(out[:real], wrong[:real]) > RMS, "rotary embedding"
        fewer = dataclasses.replace(case.copy(), lengths=(lengths - 1).clamp(min=1))
        assert rms(out[:real], case.exact(fewer)[:real]) > 1e-3, "a key less"
    for change in ("key", "value"):
        wrong_weights = dataclasses.replace(case.latent, **{change: getattr(case.latent, change).flip(0)})
        wrong = case.exact(case.copy(), wrong_weights)
        assert int(lengths.max()) == 1 or rms(out[:real], wrong[:real]) > RMS, change


def test_large_scores(device: torch.device) -> None:
    """One key takes nearly all the weight, and it lies in any split: nothing overflows."""
    case = Case(FLASH, False, [(3000, 1), (2000, 1)])
    case.scale *= 100
    batch = case.copy()
    exact = case.exact(case.copy())
    gate, out = case.outputs()
    case.run(kernel_of(FLASH, False), batch, gate, out)
    assert torch.isfinite(out).all() and rms(out, exact) < 0.2, "scores of 100 turn on the query's rounding"


@pytest.mark.parametrize("tokens", [1, 4])
def test_launches_in_a_graph_are_equal(tokens: int, device: torch.device) -> None:
    """With early starts and without, alone and in a graph that goes through other lengths between."""
    long = Case(FLASH, False, [(2500, tokens)])
    short = Case(FLASH, False, [(40, tokens)])
    plain = long.outputs()
    long.run(kernel_of(FLASH, False, pdl=False), long.copy(), *plain)
    kernel = kernel_of(FLASH, False)
    batches = [(case, case.copy(), case.outputs()) for case in (long, short, long, short)]
    for case, batch, outputs in batches:
        case.run(kernel, batch, *outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case, batch, outputs in batches:
            case.run(kernel, batch, *outputs)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    for case, _, (gate, out) in batches:
        assert case is short or (torch.equal(out, plain[1]) and torch.equal(gate, plain[0]))
    assert torch.equal(batches[1][2][1], batches[3][2][1])


def test_small_cards_have_fewer_stages(device: torch.device) -> None:
    """The plan of a GB10, run here."""
    case = Case(FLASH, True, [(900, 4)])
    exact = case.exact(case.copy())
    gate, out = case.outputs()
    case.run(kernel_of(FLASH, True, shared=99 * 1024), case.copy(), gate, out)
    assert rms(out, exact) < RMS


def test_gpus_without_clusters_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="too few"):
        MlaAttention(FLASH, True, Gpu("sm_89a", 128, 99 * 1024), device, None)
