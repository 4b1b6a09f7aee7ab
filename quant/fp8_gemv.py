# SPDX-License-Identifier: Apache-2.0
"""Skinny FP8 matrix products y = x W^T on one GPU: plan, buffers and launch of kernels/fp8_gemv.cu."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.kernel_family import KernelFamily

TOKEN_COUNTS = (1, 4, 8, 16)
_BLOCK_BYTES = 2048


@dataclass(frozen=True)
class GemvShape:
    """W is E4M3 [rows, k] with one scale per row (`row_scales`) or per 128x128 block; `argmax` replaces the output."""

    rows: int
    k: int
    row_scales: bool
    argmax: bool = False


@dataclass(frozen=True)
class GemvPlan:
    """How the kernel for up to `tokens` tokens is compiled for a GPU; `shared_bytes` per CTA, one CTA per SM."""

    tokens: int
    ctas: int
    warps: int
    ksplit: int
    stages: int
    shared_bytes: int


def unsupported(shape: GemvShape) -> str | None:
    """Why the kernel cannot serve this shape, or None."""
    if shape.k % 128:
        return f"k = {shape.k} is not a multiple of 128"
    if not shape.row_scales and shape.rows % 16:
        return f"{shape.rows} rows with block scales are not a multiple of 16"
    return None


def plan(shape: GemvShape, tokens: int, gpu: Gpu) -> GemvPlan | None:
    """The configuration whose busiest SM reads least, or None if x does not fit into shared memory.

    A warp reads whole tiles of 16 rows (`ksplit` warps share one), so an SM with w warps takes
    ceil(tiles / (SMs w / ksplit)) rounds. The small terms of the cost are fitted to timings on an H200.
    """
    tiles, blocks = -(-shape.rows // 16), shape.k // 128
    best: tuple[float, GemvPlan] | None = None
    for ksplit in (1, 2, 4, 8):
        for warps in range(ksplit, 21, ksplit):
            found = _with(shape, tokens, gpu, warps, ksplit)
            if found is None:
                continue
            rounds = -(-tiles // (gpu.sms * (warps // ksplit)))
            load = rounds * warps * -(-blocks // ksplit)
            # Few warps leave few bytes in flight, and a split costs two barriers a round.
            cost = load * max(1 + (16 - warps) / 320, 8 / warps) + (2 * rounds if ksplit > 1 else 0)
            if best is None or cost < best[0]:
                best = cost, found
    return best and best[1]


def _with(shape: GemvShape, tokens: int, gpu: Gpu, warps: int, ksplit: int) -> GemvPlan | None:
    columns = -(-tokens // 8) * 8
    fixed = 2 * tokens * (shape.k + 8) + 64
    fixed += (4 * warps * columns * 17 if ksplit > 1 else 0) + (8 * warps * columns if shape.argmax else 0)
    # Two or three stages, so that two CTAs fit: the next launch then fills its rings while this one drains.
    ring = warps * _BLOCK_BYTES
    stages = max(2, min(3, (gpu.shared_bytes // 2 - fixed) // ring))
    if fixed + stages * ring > gpu.shared_bytes:
        return None
    return GemvPlan(tokens, gpu.sms, warps, ksplit, stages, fixed + warps * stages * _BLOCK_BYTES)


def defines(shape: GemvShape, p: GemvPlan, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of fp8_gemv.cu."""
    return {
        "K": shape.k,
        "ROW_SCALES": int(shape.row_scales),
        "ARGMAX": int(shape.argmax),
        "USE_PDL": int(pdl),
        "TOKENS": p.tokens,
        "WARPS": p.warps,
        "KSPLIT": p.ksplit,
        "STAGES": p.stages,
        "SHARED_BYTES": p.shared_bytes,
    }


class Fp8Gemv:
    """Compiled kernels for one weight shape and 1 to 16 tokens; reused by all layers of that shape, on one stream."""

    def __init__(
        self, shape: GemvShape, gpu: Gpu, device: torch.device, cache: Path | None, pdl: bool = True
    ) -> None:
        """Compiles (or takes from `cache`) one kernel per entry of TOKEN_COUNTS that the GPU has room for.

        Raises:
            CompileError: with the compiler's log.
            ValueError: the shape or the GPU is not supported.
        """
        if reason := unsupported(shape):
            raise ValueError(reason)
        plans = [plan(shape, tokens, gpu) for tokens in TOKEN_COUNTS]
        self._kernels = KernelFamily(
            "fp8_gemv.cu", shape, plans, lambda p: defines(shape, p, pdl), gpu, cache
        )
        self.shape, self._pdl = shape, pdl
        self.origins, self.max_tokens = self._kernels.origins, self._kernels.max_tokens
        columns = 16 if shape.argmax else 0
        self._best = torch.empty(gpu.sms * columns, 2, dtype=torch.float32, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiplies into `out`.

        Args:
            x: contiguous BF16 [tokens, k], tokens at most `max_tokens`.
            weight: E4M3 [rows, k].
            scales: float32 [rows], or [ceil(rows / 128), k / 128].
            out: BF16 [tokens, rows]; with `argmax` int64 [tokens], the row of the largest BF16 logit, lowest on ties.
        """
        p, kernel = self._kernels.pick(x.shape[0])
        y, ids = (0, out.data_ptr()) if self.shape.argmax else (out.data_ptr(), 0)
        pointers = (x.data_ptr(), weight.data_ptr(), scales.data_ptr(), y, self._best.data_ptr())
        values = (*pointers, self._counter.data_ptr(), ids, x.shape[0], self.shape.rows)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kernel.launch((p.ctas, 1), 32 * p.warps, values, _TYPES, stream, self._pdl)
        return out


_TYPES = (ctypes.c_void_p,) * 7 + (ctypes.c_int,) * 2
