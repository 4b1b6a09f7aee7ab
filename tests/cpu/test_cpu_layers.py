# SPDX-License-Identifier: Apache-2.0
"""CPU replacements for single vLLM layers: MLA decode over several query tokens, rotary, norm, and what KDA refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from vllm_ling.cpu.attention import CpuMlaBackend, CpuMlaImpl, CpuMlaMetadataBuilder
from vllm_ling.cpu.kda import CpuKimiDeltaAttention
from vllm_ling.cpu.norm import CpuRMSNorm
from vllm_ling.cpu.rotary import CpuRotaryEmbedding
from vllm_ling.errors import LingError

BLOCK, HEADS, RANK, ROPE = 128, 2, 512, 64
SCALE = 192**-0.5


def _decode_metadata(lengths: list[int], seq_lens: list[int], blocks: Tensor) -> Any:
    builder = object.__new__(CpuMlaMetadataBuilder)
    builder.page_size = BLOCK
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return builder._build_decode(
        block_table_tensor=blocks,
        seq_lens_device=torch.tensor(seq_lens, dtype=torch.int32),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=sum(lengths),
        max_query_len=max(lengths),
        dcp_tot_seq_lens_device=None,
    )


@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 4, 4], [1, 4, 2]], ids=["decode", "verify", "ragged"])
def test_mla_query_tokens_see_their_own_past_only(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(7, BLOCK, RANK + ROPE, generator=generator)
    blocks = torch.tensor([[3, 0], [6, 2], [5, 4]], dtype=torch.int32)
    seq_lens = [17, 200, 128]
    q = torch.randn(sum(lengths), HEADS, RANK + ROPE, generator=generator)
    impl = object.__new__(CpuMlaImpl)
    impl.kv_lora_rank, impl.scale = RANK, SCALE
    metadata = SimpleNamespace(decode=_decode_metadata(lengths, seq_lens, blocks))
    out, _ = impl.forward_mqa(q, cache, metadata, layer=None)

    row = 0
    for length, seq_len, table in zip(lengths, seq_lens, blocks.tolist(), strict=True):
        keys = cache[table].flatten(0, 1)
        for position in range(seq_len - length, seq_len):
            past = keys[: position + 1]
            weights = (q[row] @ past.T * SCALE).softmax(-1)
            torch.testing.assert_close(out[row], weights @ past[:, :RANK], rtol=1e-4, atol=1e-4)
            row += 1


def test_mla_backend_keeps_whole_blocks() -> None:
    # A kernel block of 16 would make the runner clear other requests' blocks (see CpuMlaBackend).
    (size,) = CpuMlaBackend.get_supported_kernel_block_sizes()
    assert not isinstance(size, int) and size.base == 16
    assert CpuMlaBackend.supports_block_size(128) and CpuMlaBackend.supports_block_size(None)
    assert not CpuMlaBackend.supports_block_size(24)


@pytest.fixture
def vllm_config() -> Any:
    # As in eager mode; otherwise every CustomOp takes its torch form.
    config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_turns_every_head_and_strided_keys(dtype: torch.dtype, vllm_config: VllmConfig) -> None:
    layer = CpuRotaryEmbedding(ROPE, ROPE, 64, 10000.0, is_neox_style=False, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    positions = torch.tensor([0, 5, 63])
    heads = torch.randn(3, HEADS, 192, generator=generator).to(dtype)
    latent = torch.randn(3, RANK + ROPE, generator=generator).to(dtype)
    query, key = heads[..., -ROPE:], latent[:, RANK:].unsqueeze(1)
    actual = layer(positions, query, key)

    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    for given, turned in zip((query, key), actual, strict=True):
        pairs = torch.view_as_complex(given.float().contiguous().unflatten(-1, (-1, 2)))
        expected = torch.view_as_real(pairs * turn).flatten(-2)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(turned.float(), expected, rtol=tolerance, atol=tolerance)


def test_stock_rotary_still_needs_the_replacement(vllm_config: VllmConfig) -> None:
    """Fails once upstream handles three-dimensional input: then `cpu/rotary.py` can go."""
    positions, query, key = torch.tensor([5, 6]), torch.ones(2, HEADS, ROPE), torch.ones(2, 1, ROPE)
    layer = CpuRotaryEmbedding(ROPE, ROPE, 64, 10000.0, is_neox_style=False, dtype=torch.float32)
    expected, _ = layer.forward_cpu(positions, query.clone(), key.clone())
    stock, _ = RotaryEmbedding.forward_cpu(layer, positions, query.clone(), key.clone())
    assert not torch.allclose(stock, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True], ids=["norm", "add and norm"])
def test_norm_equals_the_formula(dtype: torch.dtype, add: bool, vllm_config: VllmConfig) -> None:
    layer = CpuRMSNorm(RANK, eps=1e-6, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    layer.weight.data.copy_(torch.rand(RANK, generator=generator))
    # MLA normalizes a slice of a wider projection.
    x = torch.randn(5, RANK + ROPE, generator=generator).to(dtype)[:, :RANK]
    residual = torch.randn(5, RANK, generator=generator).to(dtype) if add else None
    total = x.float() + (residual.float() if residual is not None else 0)
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.weight.float()
    result = layer(x, residual.clone()) if residual is not None else (layer(x), None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result[0].float(), expected, rtol=tolerance, atol=tolerance)
    if residual is not None:
        torch.testing.assert_close(result[1], (x.float() + residual.float()).to(dtype))


def test_norm_leaves_unusual_layers_to_upstream(vllm_config: VllmConfig) -> None:
    x = torch.randn(3, 8).bfloat16()
    layer = CpuRMSNorm(8, dtype=torch.float32)
    assert torch.equal(layer(x), RMSNorm.forward_native(layer, x))


@pytest.mark.parametrize(("safe", "bound"), [(False, -5.0), (True, -20.0), (True, 0.0)])
def test_kda_refuses_unbounded_gates(safe: bool, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, config: Any) -> None:
        self.safe_gate, self.lower_bound = config.kda_safe_gate, config.kda_lower_bound

    monkeypatch.setattr(BailingMoeV3KimiDeltaAttention, "__init__", init)
    layer = object.__new__(CpuKimiDeltaAttention)
    with pytest.raises(LingError, match=f"kda_safe_gate={safe}, kda_lower_bound={bound}"):
        layer.__init__(SimpleNamespace(kda_safe_gate=safe, kda_lower_bound=bound))  # type: ignore[misc]
