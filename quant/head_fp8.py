# SPDX-License-Identifier: Apache-2.0
"""The FP8 output head: e4m3 weights, one FP32 scale per vocabulary row (or the checkpoint's own block scales).

A BF16 head is quantized while its tensor is read, in row chunks: neither a BF16 parameter nor a second copy ever exists
on the device, and every chunk passes the probe on its way. Loading again (weight reload) repeats both.
"""

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from vllm_ling.errors import LingError
from vllm_ling.quant.block_fp8 import dequantize_block_fp8
from vllm_ling.quant.head_check import argmax_problem, logits_problem
from vllm_ling.quant.head_probe import HeadProbe
from vllm_ling.quant.row_fp8 import quantize_row_fp8
from vllm_ling.spec_decode.shared_head import head_changed
from vllm_ling.status import choose, fault, proof

# 1024 rows of 2560 values are 10.5 MB in FP32; at most four such temporaries live at once, below the 64 MB that loading
# may take on top of the head.
_CHUNK_ROWS = 1024
_BLOCK = (128, 128)


class HeadFp8Method(QuantizeMethodBase):
    """Quantization method of a `ParallelLMHead`. Deliberately not an Unquantized* subclass: vLLM treats the weight of
    those as plain numbers and would drop the scale.

    Args:
        source: where the FP8 weight comes from: quantized while loading, or stored with row or block scales.
        on_probe: on drift beyond the probe's bounds stop ("fail") or keep the BF16 weight ("bf16").
        dummy: random weights are being used (`--load-format dummy`), so scales mean nothing and are set to 1.
        decode_kernel: multiply few rows with our kernel on a GPU (BF16 activations).
    """

    def __init__(
        self,
        source: Literal["fp8_online", "fp8_row", "fp8_block"],
        on_probe: Literal["fail", "bf16"],
        dummy: bool,
        decode_kernel: bool = False,
    ) -> None:
        self._source = source
        self._on_probe = on_probe
        self._dummy = dummy
        self._wants_kernel = decode_kernel
        self._gemv: Any = None
        self._argmax: Any = None
        self._what = "lm_head"
        self._dtype = torch.get_default_dtype()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers `weight` (e4m3 [rows, hidden]) and its scale, NaN until loaded."""
        self._dtype = params_dtype
        rows, hidden = sum(output_partition_sizes), input_size_per_partition
        weight = Parameter(torch.empty(rows, hidden, dtype=torch.float8_e4m3fn), requires_grad=False)
        attributes = {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}
        if self._source == "fp8_online":
            attributes["weight_loader"] = lambda param, loaded: self._quantize(layer, loaded)
            attributes["ling_source_dtypes"] = (torch.bfloat16, torch.float16, torch.float32)
        set_weight_attrs(weight, attributes)
        layer.register_parameter("weight", weight)
        if self._source == "fp8_block":
            self._register_scale(layer, "weight_scale_inv", (_blocks(rows, 0), _blocks(hidden, 1)), _BLOCK[0])
            return
        self._register_scale(layer, "weight_scale", (rows,), 1)
        if self._source == "fp8_online":
            set_weight_attrs(layer.weight_scale, {"ling_computed": True})

    def _register_scale(self, layer: Any, name: str, shape: tuple[int, ...], rows_per_scale: int) -> None:
        scale = Parameter(torch.full(shape, torch.nan, dtype=torch.float32), requires_grad=False)

        def load(param: Parameter, loaded: torch.Tensor) -> None:
            begin, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
            if begin % rows_per_scale:
                raise LingError(
                    f"lm_head.{name}: {rows_per_scale}-row scales cannot be split at row {begin}; use TP 1"
                )
            part = loaded.float().view(-1, *shape[1:])[begin // rows_per_scale : -(-end // rows_per_scale)]
            param.data.fill_(1)
            param.data[: part.shape[0]].copy_(part)

        set_weight_attrs(scale, {"weight_loader": load})
        layer.register_parameter(name, scale)

    def _quantize(self, layer: Any, loaded: torch.Tensor) -> None:
        """Quantizes this rank's rows of `loaded` (BF16 [vocab, hidden]) into the layer, probing on the way."""
        shard = layer.shard_indices
        rows = loaded[shard.org_vocab_start_index : shard.org_vocab_end_index]
        weight, scale = layer.weight.data, layer.weight_scale.data
        probe = HeadProbe(rows.shape[1], weight.device)
        for part in _chunks(rows.shape[0]):
            exact = rows[part].to(weight.device)
            weight[part], scale[part] = quantize_row_fp8(exact)
            probe.update(exact.float(), weight[part].float() * scale[part, None])
        weight[rows.shape[0] :].zero_()
        scale[rows.shape[0] :] = 1
        result = probe.result()
        if result.ok:
            proof("head_probe", str(result))
        elif self._on_probe == "bf16":
            fault(
                "head_probe",
                f"the FP8 head drifts from the BF16 head: {result}; keeping BF16 (ling.on_probe=bf16)",
            )
            plain = torch.zeros(weight.shape, dtype=loaded.dtype, device=weight.device)
            plain[: rows.shape[0]].copy_(rows)
            layer.weight = Parameter(plain, requires_grad=False)
            choose("lm_head", "bf16", "the FP8 head failed its probe")
        else:
            raise LingError(f"lm_head.weight: FP8 drifts from BF16: {result}; start with ling.lm_head=bf16")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the scales and settles on kernels; runs again after every reload."""
        self._gemv = self._argmax = None
        if layer.weight.dtype == torch.float8_e4m3fn:
            self._settle(layer)
        head_changed(layer)

    def _settle(self, layer: Any) -> None:
        scale = self.scale(layer)
        if self._dummy:
            scale.data.fill_(2.0**-8)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise LingError(
                f"{self._what}: the FP8 head has rows whose scale is missing, zero, negative or NaN"
            )
        self._gemv, reason = self._decode_kernel(layer)
        if self._gemv is not None and (reason := self._problem(layer)):
            self._gemv = None
        self._settle_argmax(layer)
        what = f"{self._what} decode kernel"
        if self._gemv is not None:
            choose(what, "ling", f"up to {self._gemv.max_tokens} rows with BF16 activations")
        elif self._wants_kernel:
            choose(what, "none", reason)
        what = f"{self._what} kernel"
        if current_platform.is_cuda() and self._source != "fp8_block":
            choose(what, "cutlass_scaled_mm", "FP8 weights and per-token FP8 activations, row scales")
        else:
            choose(what, "dequantize", "no FP8 GEMM for this device or scale layout")

    def for_rows(self) -> "HeadFp8Method":
        """A method of the same kind, with kernels of its own, for a layer that holds `gather`ed rows."""
        method = copy.copy(self)
        method._what = "draft lm_head"
        return method

    def gather(self, layer: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of the rows `ids` (int64, on the layer's device), by parameter name.

        A scale per row goes along with its row. A block of 128 rows falls apart, so its rows come back multiplied by
        their scales in the model's dtype: the numbers that `apply` computes with, in twice the bytes.
        """
        if layer.weight.dtype != torch.float8_e4m3fn:
            return {"weight": layer.weight.data[ids]}
        codes = layer.weight.data.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
        if self._source != "fp8_block":
            return {"weight": codes, "weight_scale": layer.weight_scale.data[ids]}
        exact = torch.empty(codes.shape, dtype=self._dtype, device=codes.device)
        for part in _chunks(len(ids)):
            scale = layer.weight_scale_inv.data[ids[part] // _BLOCK[0]].repeat_interleave(_BLOCK[1], -1)
            exact[part] = (codes[part].float() * scale[:, : codes.shape[1]]).to(self._dtype)
        return {"weight": exact}

    def _decode_kernel(self, layer: Any, argmax: bool = False) -> tuple[Any, str]:
        if not self._wants_kernel:
            return None, "ling.linear=stock"
        if not current_platform.is_cuda():
            return None, "no NVIDIA GPU"
        try:
            from vllm_ling.quant.fp8_gemv import GemvShape
            from vllm_ling.quant.linear_decode import gemv_for

            rows, hidden = layer.weight.shape
            rows = layer.org_vocab_size if argmax else rows  # padding must not win
            shape = GemvShape(rows, hidden, row_scales=self._source != "fp8_block", argmax=argmax)
            return gemv_for(shape, layer.weight.device), ""
        except (RuntimeError, ValueError, ImportError) as error:
            return None, f"{type(error).__name__}: {error}"

    def _problem(self, layer: Any) -> str:
        """Why our kernel cannot be used on these weights, or ""."""
        weight, scale = layer.weight, self.scale(layer)

        def exact(part: slice) -> torch.Tensor:
            if self._source != "fp8_block":
                return weight[part].float() * scale[part, None]
            blocks = scale[part.start // _BLOCK[0] : _blocks(part.stop, 0)]
            return dequantize_block_fp8(weight[part], blocks, _BLOCK)

        return logits_problem(
            self._code("decode"),
            lambda x: self._product(layer, x),
            self._gemv.max_tokens,
            weight,
            _chunks(weight.shape[0]),
            exact,
        )

    def _settle_argmax(self, layer: Any) -> None:
        """Takes the kernel that finds the best row without writing logits, where it finds what they say."""
        shard = getattr(layer, "shard_indices", None)  # the draft's own rows have none
        if self._gemv is None or shard is None or shard.num_org_elements != layer.org_vocab_size:
            return
        self._argmax, reason = self._decode_kernel(layer, argmax=True)
        if self._argmax is not None:
            reason = argmax_problem(
                self._code("argmax"),
                lambda x, out: self._best(layer, x, out),
                lambda x: self._product(layer, x),
                self._argmax.max_tokens,
                layer.weight,
                layer.org_vocab_size,
            )
            self._argmax = None if reason else self._argmax
        what = f"{self._what} argmax kernel"
        if self._argmax is not None:
            choose(what, "ling", f"up to {self._argmax.max_tokens} rows, without logits")
        else:
            choose(what, "none", reason)

    def _code(self, kernel: str) -> str:
        """Under which a comparison of a kernel goes on record."""
        return f"{self._what.replace(' ', '_')}_{kernel}"

    def _product(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], layer.weight.shape[0], dtype=x.dtype, device=x.device)
        return self._gemv(x, layer.weight, self.scale(layer), out)

    def _best(self, layer: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        best: torch.Tensor = self._argmax(x, layer.weight, self.scale(layer), out)
        return best

    def scale(self, layer: Any) -> torch.Tensor:
        """The layer's scale parameter: [rows] or [rows / 128, hidden / 128]."""
        return layer.weight_scale_inv if self._source == "fp8_block" else layer.weight_scale

    @property
    def most_best_rows(self) -> int:
        """The most tokens whose `best_rows` are those of the logits that `apply` gives; 0 where no kernel does both."""
        if self._gemv is None or self._argmax is None:
            return 0
        return min(self._gemv.max_tokens, self._argmax.max_tokens)

    def best_rows(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """int64 [tokens], the row of the largest logit of each hidden state `x` [tokens, hidden]; writes no logits.

        None where no kernel does that: too many tokens, another dtype, only part of the vocabulary here.
        """
        kernel = self._argmax
        if kernel is None or x.dtype != torch.bfloat16 or not 0 < x.shape[0] <= kernel.max_tokens:
            return None
        out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        return self._best(layer, x.contiguous(), out)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., rows] of hidden states `x` [..., hidden], in x's dtype."""
        if layer.weight.dtype != torch.float8_e4m3fn:
            return F.linear(x, layer.weight.to(x.dtype), bias)
        rows = x.numel() // x.shape[-1]
        if (
            self._gemv is not None
            and bias is None
            and x.dtype == torch.bfloat16
            and 0 < rows <= self._gemv.max_tokens
        ):
            flat = x.reshape(rows, x.shape[-1]).contiguous()
            return self._product(layer, flat).view(*x.shape[:-1], -1)
        if self._source == "fp8_block":
            return F.linear(
                x, dequantize_block_fp8(layer.weight, layer.weight_scale_inv, _BLOCK, x.dtype), bias
            )
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            return _scaled_mm(x, layer.weight, layer.weight_scale, bias)
        # e4m3 values are exact in BF16, so only the product is rounded; the row scale is applied in FP32.
        logits = F.linear(x, layer.weight.to(x.dtype)).float() * layer.weight_scale
        return (logits if bias is None else logits + bias).to(x.dtype)


def _scaled_mm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    from vllm import _custom_ops as ops

    flat = x.reshape(-1, x.shape[-1])
    quantized, token_scale = ops.scaled_fp8_quant(flat, use_per_token_if_dynamic=True)
    logits = ops.cutlass_scaled_mm(quantized, weight.t(), token_scale, scale.view(1, -1), x.dtype, bias)
    return logits.view(*x.shape[:-1], -1)


def _chunks(rows: int) -> Iterator[slice]:
    for begin in range(0, rows, _CHUNK_ROWS):
        yield slice(begin, min(begin + _CHUNK_ROWS, rows))


def _blocks(size: int, axis: int) -> int:
    return -(-size // _BLOCK[axis])
