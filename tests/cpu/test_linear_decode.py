# SPDX-License-Identifier: Apache-2.0
"""Our FP8 products at load: each is compared with vLLM's on the loaded weights, and one that is wrong does not serve.

vLLM's GEMM and our kernels are torch stand-ins, as a CPU has neither; when they are asked, and what follows, is the
product's.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

from vllm_ling.decode.from_vllm import Unsuitable, projection
from vllm_ling.quant import linear_check, linear_decode
from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.head_fp8 import HeadFp8Method
from vllm_ling.quant.linear_check import furthest
from vllm_ling.quant.linear_decode import LingFp8LinearMethod
from vllm_ling.quant.row_fp8 import quantize_row_fp8
from vllm_ling.status import STATUS

ROWS, K = 384, 512


class Gemv:
    """Stands in for `Fp8Gemv`; `wrong` changes what it multiplies by."""

    max_tokens = 16

    def __init__(self, wrong: Any = None, at: int | None = None) -> None:
        self.wrong, self.at, self.counts = wrong, at, list[int]()

    def __call__(self, x: torch.Tensor, weight: Any, scales: Any, out: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(x))
        exact = (
            dequantize_block_fp8(weight, scales) if scales.dim() == 2 else weight.float() * scales[:, None]
        )
        if self.wrong is not None and self.at in (None, len(x)):
            exact = self.wrong(exact)
        return out.copy_(x.float() @ exact.T)


def vllm_gemm(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """Activations rounded to E4M3, as vLLM's GEMM does."""
    layer.asked.append(x.shape[0])
    rounded = (x.float() * 16).to(torch.float8_e4m3fn).float() / 16
    exact = dequantize_block_fp8(layer.weight, layer.weight_scale_inv)
    return (rounded @ exact.T * layer.factor).to(x.dtype)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(Fp8LinearMethod, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(Fp8LinearMethod, "apply", vllm_gemm)
    monkeypatch.setattr(linear_decode, "_LAYERS", [])
    monkeypatch.setattr(linear_check, "_unreported", set())
    linear_check._COMPARED.clear()
    records = (STATUS.choices, STATUS.faults, STATUS.proofs)
    for record in records:
        record.clear()
    yield
    for record in records:
        record.clear()


def settle(
    monkeypatch: pytest.MonkeyPatch, gemv: Any, name: str = "o_proj", factor: float = 1.0, zero: bool = False
) -> tuple[Any, Any]:
    """A layer after loading, and its method."""
    layer: Any = torch.nn.Module()
    codes, scales = quantize_block_fp8(torch.randn(ROWS, K, dtype=torch.float32) * (0 if zero else 1))
    layer.weight = Parameter(codes, requires_grad=False)
    layer.weight_scale_inv = Parameter(scales, requires_grad=False)
    layer.prefix, layer.factor, layer.asked = name, factor, []
    method: Any = LingFp8LinearMethod.__new__(LingFp8LinearMethod)
    method.compared_tokens = 32
    layer.quant_method = method
    monkeypatch.setattr(linear_decode, "gemv_for", lambda shape, device: gemv)
    method.process_weights_after_loading(layer)
    return layer, method


def test_agreement_takes_our_kernel_and_is_told_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gemv = Gemv()
    layers = [settle(monkeypatch, gemv, name) for name in ("q_proj", "o_proj")]
    for layer, method in layers:
        assert method._gemv is gemv and layer.ling_problem == "" and layer.asked == [32]
    assert gemv.counts == [1, 4, 8] * 2, "every kernel that can be asked for"
    assert not STATUS.proofs
    linear_check.report()
    said = STATUS.proofs.pop("linear_decode")
    assert said.startswith("2 projections agree with vLLM's GEMM") and "_proj, 0.02" in said
    linear_check.report()
    assert not STATUS.proofs and not STATUS.faults
    assert STATUS.choices[f"linear {ROWS} x {K}"].choice == "ling"


def one_scale(exact: torch.Tensor) -> torch.Tensor:
    """One of twelve blocks twice as large as it is."""
    wrong = exact.clone()
    wrong[128:256, :128] *= 2
    return wrong


@pytest.mark.parametrize(
    ("gemv", "factor"),
    [
        (Gemv(lambda exact: 2 * exact), 1.0),
        (Gemv(one_scale), 1.0),
        (Gemv(lambda exact: exact.roll(1, 0)), 1.0),
        (Gemv(lambda exact: exact * float("nan")), 1.0),
        (Gemv(lambda exact: exact * 0, at=1), 1.0),
        (Gemv(lambda exact: exact * 0, at=8), 1.0),
        (Gemv(), 2.0),
        (Gemv(), float("nan")),
    ],
    ids=[
        "scale",
        "a block's scale",
        "rows",
        "nan",
        "one token",
        "eight tokens",
        "vLLM's scale",
        "vLLM's nan",
    ],
)
def test_disagreement_is_a_fault_and_leaves_vllm(
    monkeypatch: pytest.MonkeyPatch, gemv: Gemv, factor: float
) -> None:
    layer, method = settle(monkeypatch, gemv, factor=factor)
    good, good_method = settle(monkeypatch, Gemv(), "next")
    assert method._gemv is None and good_method._gemv is not None
    assert "1 of 1 projections disagree" in STATUS.faults["linear_decode"]
    decided = STATUS.choices["linear o_proj"]
    assert decided.choice == "stock" and "away from vLLM's GEMM" in decided.reason
    assert STATUS.choices[f"linear {ROWS} x {K}"].choice == "ling", "the next layer of this shape agrees"
    linear_check.report()
    assert not STATUS.proofs
    before = len(gemv.counts)
    x = torch.randn(2, K, dtype=torch.float32).bfloat16()
    found = method.few_or_many(layer, x)
    torch.testing.assert_close(found, vllm_gemm(method, layer, x), rtol=0, atol=0, equal_nan=True)
    assert len(gemv.counts) == before
    kernels: Any = SimpleNamespace(gemv=lambda shape: SimpleNamespace(shape=shape))
    with pytest.raises(Unsuitable, match=r"MLA's dense: .* away from vLLM's GEMM"):
        projection(kernels, (good, layer), "none", "MLA's dense")
    assert projection(kernels, (good,), "none", "MLA's dense").weight[0].data_ptr() == good.weight.data_ptr()


@pytest.mark.parametrize("how", ["zero", "fails"])
def test_without_evidence_vllm_serves(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory")

    gemv: Any = Gemv() if how == "zero" else Gemv(broken)
    _, method = settle(monkeypatch, gemv, zero=how == "zero")
    assert method._gemv is None and not STATUS.faults
    decided = STATUS.choices["linear o_proj"]
    reason = "nothing to compare" if how == "zero" else "RuntimeError: no memory"
    assert decided.choice == "stock" and reason in decided.reason
    linear_check.report()
    assert not STATUS.proofs


def test_a_reload_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, method = settle(monkeypatch, Gemv())
    scales = layer.ling_scales
    layer.factor = 3.0
    method.process_weights_after_loading(layer)
    assert method._gemv is None and layer.ling_problem and layer.ling_scales is scales
    layer.factor = 1.0
    method.process_weights_after_loading(layer)
    assert method._gemv is not None and not layer.ling_problem and layer.ling_scales is scales


def test_layers_that_are_gone_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were built to be timed."""
    kept = settle(monkeypatch, Gemv(), "kept")
    settle(monkeypatch, Gemv(), "gone")
    linear_check.report()
    assert STATUS.proofs["linear_decode"].startswith("1 projections") and kept[0].ling_problem == ""


def test_a_gpu_with_room_for_four_tokens_gives_more_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """6144 columns on 99 KB of shared memory; no kernel takes five."""
    gemv = Gemv()
    gemv.max_tokens = 4
    layer, method = settle(monkeypatch, gemv)
    assert gemv.counts == [1, 4] and "up to 4 tokens" in STATUS.choices[f"linear {ROWS} x {K}"].reason
    for tokens in (4, 5):
        x = torch.ones(tokens, K, dtype=torch.bfloat16)
        assert method.few_or_many(layer, x).shape == (tokens, ROWS)
    assert gemv.counts == [1, 4, 4] and layer.asked == [32, 5]


@pytest.mark.parametrize(("profiled", "compared"), [(4096, 4096), (4, 4), (65536, 8192)])
def test_vllm_gets_as_many_tokens_as_in_its_profiling_run(
    monkeypatch: pytest.MonkeyPatch, profiled: int, compared: int
) -> None:
    """Its GEMM may be compiled for their number; another one would cost a compilation for each shape."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=profiled))
    monkeypatch.setattr(linear_decode, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(LingFp8LinearMethod, "__init__", lambda self, config: None)
    stock: Any = Fp8LinearMethod.__new__(Fp8LinearMethod)
    stock.block_quant = True
    assert linear_decode.with_decode_kernel(stock, None).compared_tokens == compared
    stock.block_quant = False
    assert linear_decode.with_decode_kernel(stock, None) is stock


def test_furthest_is_by_128_rows() -> None:
    right = torch.randn(2, 300, dtype=torch.float32)
    right[:, 128:256] *= 1e-3
    ours = right.clone()
    ours[:, 128:256] *= 1.5
    assert float(furthest(ours, right)) == pytest.approx(0.5)
    ours[:, 256:] *= 3
    assert float(furthest(ours, right)) == pytest.approx(2.0)
    ours[0, 0] = float("nan")
    assert furthest(ours, right).isnan()
    padded = torch.cat([right, torch.zeros(2, 256)], -1)
    assert float(furthest(padded, padded)) == 0
    assert float(furthest(padded + 1e-9, padded)) == float("inf")


def head(monkeypatch: pytest.MonkeyPatch, gemv: Any, source: Any = "fp8_row", weight: Any = None) -> Any:
    rows, hidden = 2304, 256
    if weight is None:
        weight = torch.randn(rows, hidden, dtype=torch.float32)
    layer: Any = torch.nn.Module()
    if source == "fp8_block":
        codes, scales = quantize_block_fp8(weight)
        layer.weight_scale_inv = Parameter(scales, requires_grad=False)
    else:
        codes, scales = quantize_row_fp8(weight)
        layer.weight_scale = Parameter(scales, requires_grad=False)
    layer.weight = Parameter(codes, requires_grad=False)
    method = HeadFp8Method(source, "fail", dummy=False, decode_kernel=True)
    monkeypatch.setattr(method, "_decode_kernel", lambda layer: (gemv, ""))
    method.process_weights_after_loading(layer)
    return method


@pytest.mark.parametrize("source", ["fp8_row", "fp8_block"])
def test_the_heads_kernel_is_compared(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    gemv = Gemv()
    assert head(monkeypatch, gemv, source)._gemv is gemv and gemv.counts == [1, 4, 8, 16]
    assert "0.00" in STATUS.proofs["lm_head_decode"] and "4 token counts" in STATUS.proofs["lm_head_decode"]
    assert STATUS.choices["lm_head decode kernel"].choice == "ling" and not STATUS.faults


def one_row(exact: torch.Tensor) -> torch.Tensor:
    wrong = exact.clone()
    wrong[-1] *= 2
    return wrong


@pytest.mark.parametrize("source", ["fp8_row", "fp8_block"])
@pytest.mark.parametrize(
    "gemv",
    [Gemv(one_row), Gemv(lambda exact: exact * 0, at=16), Gemv(lambda exact: exact * float("nan"))],
    ids=["the last row's scale", "sixteen tokens", "nan"],
)
def test_a_head_kernel_that_is_wrong_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, source: str, gemv: Gemv
) -> None:
    assert head(monkeypatch, gemv, source)._gemv is None
    decided = STATUS.choices["lm_head decode kernel"]
    assert decided.choice == "none" and "from an fp32 product" in decided.reason
    assert "our kernel is" in STATUS.faults["lm_head_decode"] and not STATUS.proofs


def test_a_head_of_zeros_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(2304, 256, dtype=torch.float32)
    assert head(monkeypatch, Gemv(), "fp8_row", zeros)._gemv is None
    assert "it is zero" in STATUS.choices["lm_head decode kernel"].reason
    assert not STATUS.proofs and not STATUS.faults


class Best:
    """Stands in for `Fp8Gemv` with `argmax`; `rows` are those it looks at, `last` the row of the last token."""

    max_tokens = 8

    def __init__(self, rows: int | None = None, last: Any = None, writes: bool = True) -> None:
        self.rows, self.last, self.writes = rows, last, writes

    def __call__(self, x: torch.Tensor, weight: Any, scales: Any, out: torch.Tensor) -> torch.Tensor:
        logits = (x.float() @ (weight.float() * scales[:, None]).T).bfloat16()[:, : self.rows]
        if self.writes:
            out.copy_(logits.argmax(-1))
        if self.last is not None and len(x) == self.max_tokens:
            out[-1] = self.last(logits)
        return out


def head_with_argmax(monkeypatch: pytest.MonkeyPatch, best: Any, weight: Any = None) -> tuple[Any, Any]:
    """A head of 2304 rows, 2200 of them of the vocabulary."""
    layer: Any = torch.nn.Module()
    if weight is None:
        # Not the numbers that the random tokens are: each would find its own row, and the first eight only.
        generator = torch.Generator().manual_seed(7)
        weight = torch.randn(2304, 256, dtype=torch.float32, generator=generator)
    codes, scales = quantize_row_fp8(weight)
    layer.weight, layer.weight_scale = (Parameter(one, requires_grad=False) for one in (codes, scales))
    layer.org_vocab_size, layer.shard_indices = 2200, SimpleNamespace(num_org_elements=2200)
    method = HeadFp8Method("fp8_row", "fail", dummy=False, decode_kernel=True)
    kernels = {False: (Gemv(), ""), True: (best, "" if best else "no room")}
    monkeypatch.setattr(method, "_decode_kernel", lambda layer, argmax=False: kernels[argmax])
    method.process_weights_after_loading(layer)
    return layer, method


def test_the_heads_argmax_kernel_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, method = head_with_argmax(monkeypatch, Best(2200))
    assert "13 random tokens, 3 token counts" in STATUS.proofs["lm_head_argmax"] and not STATUS.faults
    assert STATUS.choices["lm_head argmax kernel"].choice == "ling"
    x = torch.randn(2, 256, dtype=torch.float32).bfloat16()
    assert method.best_rows(layer, x).tolist() == method.apply(layer, x)[:, :2200].argmax(-1).tolist()


def test_any_row_of_the_largest_logit_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.randn(1152, 256, dtype=torch.float32)
    twice = torch.cat([half[:1100], half[:1100], half[1100:].repeat(2, 1)])
    _, method = head_with_argmax(
        monkeypatch, Best(2200, last=lambda logits: (logits[-1].argmax() + 1100) % 2200), twice
    )
    assert method._argmax is not None and "lm_head_argmax" in STATUS.proofs


@pytest.mark.parametrize(
    "best",
    [
        Best(2200, last=lambda logits: logits[-1].topk(2).indices[1]),
        Best(2200, last=lambda logits: 2200),
        Best(2200, last=lambda logits: -1),
        Best(1000),
        Best(writes=False),
    ],
    ids=["the second", "padding", "negative", "half of the rows", "nothing"],
)
def test_an_argmax_kernel_that_is_wrong_does_not_serve(monkeypatch: pytest.MonkeyPatch, best: Best) -> None:
    layer, method = head_with_argmax(monkeypatch, best)
    assert method._gemv is not None and method._argmax is None
    assert method.best_rows(layer, torch.ones(1, 256, dtype=torch.bfloat16)) is None
    assert "of 13 random tokens" in STATUS.faults["lm_head_argmax"]
    assert "lm_head_argmax" not in STATUS.proofs and "lm_head_decode" in STATUS.proofs
    decided = STATUS.choices["lm_head argmax kernel"]
    assert decided.choice == "none" and "misses the largest logit" in decided.reason


def test_an_argmax_kernel_without_evidence_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    fails.max_tokens = 8  # type: ignore[attr-defined]
    for best, reason in ((fails, "not compared with the logits: RuntimeError: no memory"), (None, "no room")):
        _, method = head_with_argmax(monkeypatch, best)
        assert method._argmax is None and STATUS.choices["lm_head argmax kernel"].reason == reason
        assert "lm_head_argmax" not in STATUS.proofs and not STATUS.faults
