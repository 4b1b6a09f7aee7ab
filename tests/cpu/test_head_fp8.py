# SPDX-License-Identifier: Apache-2.0
"""HeadFp8Method on a bare layer: online quantization, TP shards, padding, reload, refusal and the BF16 way out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ling.errors import LingError
from vllm_ling.quant.head_fp8 import HeadFp8Method
from vllm_ling.quant.row_fp8 import dequantize_row_fp8, quantize_row_fp8
from vllm_ling.status import STATUS

VOCAB, HIDDEN = 5000, 256


@pytest.fixture(autouse=True)
def bf16_default() -> Any:
    """vLLM builds and loads models under the model's dtype as torch's default."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    STATUS.faults.clear()


def head(
    begin: int = 0, end: int = VOCAB, padding: int = 0, on_probe: Any = "fail"
) -> tuple[HeadFp8Method, Any]:
    layer: Any = torch.nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end)
    method = HeadFp8Method("fp8_online", on_probe, dummy=False)
    rows = end - begin + padding
    method.create_weights(layer, HIDDEN, [rows], HIDDEN, rows, torch.bfloat16, weight_loader=None)
    return method, layer


def weight(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float32).mul(0.05).bfloat16()


def test_online_head_equals_its_codec() -> None:
    method, layer = head()
    assert torch.isnan(layer.weight_scale).all(), "the scale must be unusable until loaded"
    layer.weight.weight_loader(layer.weight, weight())
    method.process_weights_after_loading(layer)
    exact = dequantize_row_fp8(*quantize_row_fp8(weight()))
    x = torch.randn(3, HIDDEN)
    logits = method.apply(layer, x)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), x.float() @ exact.T, rtol=2e-2, atol=2e-2)
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale.dtype == torch.float32


def test_shards_and_padding() -> None:
    whole_method, whole = head()
    whole.weight.weight_loader(whole.weight, weight())
    x = torch.randn(2, HIDDEN)
    parts = []
    for begin, end, padding in ((0, 2500, 0), (2500, 5000, 60)):
        method, layer = head(begin, end, padding)
        layer.weight.weight_loader(layer.weight, weight())
        method.process_weights_after_loading(layer)
        logits = method.apply(layer, x)
        assert not logits[:, end - begin :].any(), "padding rows must give zero logits"
        parts.append(logits[:, : end - begin])
    assert torch.equal(torch.cat(parts, -1), whole_method.apply(whole, x))


def test_reload_replaces_the_old_weights() -> None:
    method, layer = head()
    for seed in (1, 2):
        layer.weight.weight_loader(layer.weight, weight(seed))
        method.process_weights_after_loading(layer)
    fresh_method, fresh = head()
    fresh.weight.weight_loader(fresh.weight, weight(2))
    x = torch.randn(2, HIDDEN)
    assert torch.equal(method.apply(layer, x), fresh_method.apply(fresh, x))


def hostile() -> torch.Tensor:
    """One large common value per row: E4M3 has nothing left for the values that tell the rows apart."""
    rows = weight()
    rows[:, 7] = 1e5
    return rows


def test_drifting_head_is_refused() -> None:
    _, layer = head()
    with pytest.raises(LingError, match=r"lm_head\.weight: FP8 drifts from BF16.*ling\.lm_head=bf16"):
        layer.weight.weight_loader(layer.weight, hostile())


def test_drifting_head_can_stay_bf16() -> None:
    method, layer = head(on_probe="bf16")
    layer.weight.weight_loader(layer.weight, hostile())
    method.process_weights_after_loading(layer)
    assert layer.weight.dtype == torch.bfloat16 and "head_probe" in STATUS.faults
    x = torch.randn(2, HIDDEN)
    assert torch.equal(method.apply(layer, x), torch.nn.functional.linear(x, hostile()))


def test_missing_scale_is_refused() -> None:
    method, layer = head()
    with pytest.raises(LingError, match="scale is missing"):
        method.process_weights_after_loading(layer)
