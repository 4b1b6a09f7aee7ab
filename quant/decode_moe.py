# SPDX-License-Identifier: Apache-2.0
"""Launches the decode kernels of a MoE block: router, gate_up, down, for one layer shape on one GPU."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ling.quant.jit import Kernel, build

_GATE_UP_WARPS, _DOWN_WARPS, _ROUTER_WARPS = 8, 16, 4


@dataclass(frozen=True)
class MoEShape:
    """What the kernels are compiled for."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    gate_bf16: bool = False
    wide_scales: bool = False


@dataclass(frozen=True)
class MoEWeights:
    """Device tensors of one layer. Experts in `layout` order; the shared expert as stored, its scales float32."""

    gate: torch.Tensor
    bias: torch.Tensor
    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    shared_w13: torch.Tensor
    shared_s13: torch.Tensor
    shared_w2: torch.Tensor
    shared_s2: torch.Tensor


def unsupported(shape: MoEShape) -> str | None:
    """Why the kernels cannot serve this shape, or None."""
    rules = (
        (shape.hidden % 128 == 0, f"hidden size {shape.hidden} is not a multiple of 128"),
        (shape.intermediate % 128 == 0, f"intermediate size {shape.intermediate} is not a multiple of 128"),
        (
            shape.experts % 32 == 0 and shape.experts <= 1024,
            f"{shape.experts} experts: not a multiple of 32 up to 1024",
        ),
        (32 % shape.groups == 0, f"{shape.groups} expert groups do not divide 32 lanes"),
        (shape.top_k <= 32, f"top-{shape.top_k} routing exceeds 32"),
    )
    return next((reason for holds, reason in rules if not holds), None)


def defines(shape: MoEShape, max_tokens: int, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of moe_decode.cu and router.cu."""
    return {
        "HIDDEN": shape.hidden,
        "INTER": shape.intermediate,
        "EXPERTS": shape.experts,
        "TOP_K": shape.top_k,
        "TOKENS": max_tokens,
        "GROUPS": shape.groups,
        "TOP_GROUPS": shape.top_groups,
        "GATE_TYPE": "bf16_t" if shape.gate_bf16 else "float",
        "WIDE_SCALES": int(shape.wide_scales),
        "GATE_UP_WARPS": _GATE_UP_WARPS,
        "DOWN_WARPS": _DOWN_WARPS,
        "USE_PDL": int(pdl),
    }


def gate_up_shared_bytes(shape: MoEShape, max_tokens: int) -> int:
    """Dynamic shared memory of `gate_up`: the staged tokens and the warps' partial sums."""
    return max_tokens * (shape.hidden + 8) * 2 + _GATE_UP_WARPS * 2 * 64 * 8 * 4


class MoEDecoder:
    """Compiled kernels and scratch buffers for one shape and up to `max_tokens` tokens; reused by all its layers."""

    def __init__(
        self, shape: MoEShape, max_tokens: int, device: torch.device, arch: str, cache: Path | None, pdl: bool
    ) -> None:
        self.shape, self.max_tokens, self._pdl = shape, max_tokens, pdl
        flags = defines(shape, max_tokens, pdl)
        moe, router = build("moe_decode.cu", flags, arch, cache), build("router.cu", flags, arch, cache)
        self.origin = moe.origin
        self._logits_kernel = Kernel(router.cubin, "router_logits")
        self._route = Kernel(router.cubin, "route")
        self._gate_up = Kernel(moe.cubin, "gate_up", gate_up_shared_bytes(shape, max_tokens))
        self._down = Kernel(moe.cubin, "down")
        pairs = max_tokens * shape.top_k
        self.logits = torch.empty(max_tokens, shape.experts, device=device)
        self.topk_weights = torch.empty(max_tokens, shape.top_k, device=device)
        self.topk_ids = torch.empty(max_tokens, shape.top_k, dtype=torch.int32, device=device)
        self.schedule = torch.zeros(1 + pairs * 2 + pairs * 8, dtype=torch.int32, device=device)
        self.act = torch.zeros(1 + pairs, 8, shape.intermediate, dtype=torch.bfloat16, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        w: MoEWeights,
        out: torch.Tensor,
        scaling: float,
        limit: float,
        shared_limit: float,
    ) -> torch.Tensor:
        """Routed plus shared experts of `x` (BF16 [tokens, hidden]) into `out`; a limit of 0 means no clamp."""
        shape, tokens = self.shape, x.shape[0]
        stream = torch.cuda.current_stream(x.device).cuda_stream

        def launch(kernel: Kernel, grid: tuple[int, int], threads: int, *args: Any) -> None:
            values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
            types = tuple(_ctype(a) for a in args)
            kernel.launch(grid, threads, values, types, stream, self._pdl)

        grid = (shape.experts // _ROUTER_WARPS, 1)
        launch(self._logits_kernel, grid, _ROUTER_WARPS * 32, x, w.gate, self.logits, tokens)
        threads = max(shape.experts, 32 * self.max_tokens)
        outputs = (self.schedule, self.topk_weights, self.topk_ids)
        launch(self._route, (1, 1), threads, self.logits, w.bias, *outputs, tokens, float(scaling))
        grid = (shape.intermediate // 64, 1 + tokens * shape.top_k)
        weights = (w.w13, w.s13, w.shared_w13, w.shared_s13)
        limits = (float(limit), float(shared_limit))
        launch(
            self._gate_up, grid, _GATE_UP_WARPS * 32, x, *weights, self.schedule, self.act, tokens, *limits
        )
        weights = (w.w2, w.s2, w.shared_w2, w.shared_s2)
        launch(
            self._down,
            (shape.hidden // 32, 1),
            _DOWN_WARPS * 32,
            self.act,
            *weights,
            self.schedule,
            out,
            tokens,
        )
        return out


def _ctype(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_int if isinstance(value, int) else ctypes.c_float
