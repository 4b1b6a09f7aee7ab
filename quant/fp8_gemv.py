# SPDX-License-Identifier: Apache-2.0
"""Skinny FP8 matrix products y = x W^T on one GPU: plan, buffers and launch of kernels/fp8_gemv.cu."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.kernel_family import KernelFamily

TOKEN_COUNTS = (1, 4, 8, 16)
_BLOCK_BYTES = 2048
Prologue = Literal["none", "norm", "swiglu", "gated", "joined"]  # in the order of fp8_gemv.cu's PROLOGUE


@dataclass(frozen=True)
class GemvShape:
    """W is E4M3 [rows, k] with one scale per row (`row_scales`) or per 128x128 block; `argmax` replaces the output.

    Attributes:
        prologue: what W is multiplied with: x as it is, its RMSNorm, silu(x[:, :k]) * x[:, k:] of an x twice as
            wide, x times a factor for each 128 columns, or the RMSNorms of two inputs half as wide side by side.
        parts: rows of each tensor that W is made of, if they are several (at most three, block scales).
    """

    rows: int
    k: int
    row_scales: bool
    argmax: bool = False
    prologue: Prologue = "none"
    parts: tuple[int, ...] = ()


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
    if shape.prologue == "joined" and shape.k % 256:
        return f"two halves of {shape.k // 2} are not multiples of 128"
    if not shape.row_scales and shape.rows % 16:
        return f"{shape.rows} rows with block scales are not a multiple of 16"
    if shape.parts and (
        sum(shape.parts) != shape.rows or len(shape.parts) > 3 or any(p % 16 for p in shape.parts)
    ):
        return f"{shape.parts} are not up to three multiples of 16 with the sum {shape.rows}"
    return None


def plan(shape: GemvShape, tokens: int, gpu: Gpu) -> GemvPlan | None:
    """The configuration whose busiest SM reads least, or None if x does not fit into shared memory.

    A warp reads whole tiles of 16 rows (`ksplit` warps share one), so an SM with w warps takes
    ceil(tiles / (SMs w / ksplit)) rounds. The small terms of the cost are fitted to timings on an H200.
    """
    tiles, blocks = -(-shape.rows // 16), shape.k // 128
    if shape.prologue == "joined" and tokens > 8:
        return None  # both inputs and their norms would not stay in registers
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
    fixed += 4 * tokens * (shape.k // 128) if shape.prologue in ("norm", "joined") else 0
    fixed += 4 * warps * columns * 17 if ksplit > 1 else 0
    # Two or three stages, so that two CTAs fit: the next launch then fills its rings while this one drains.
    ring = warps * _BLOCK_BYTES
    stages = max(2, min(3, (gpu.shared_bytes // 2 - fixed) // ring))
    if fixed + stages * ring > gpu.shared_bytes:
        return None
    return GemvPlan(tokens, gpu.sms, warps, ksplit, stages, fixed + warps * stages * _BLOCK_BYTES)


def defines(shape: GemvShape, p: GemvPlan, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of fp8_gemv.cu."""
    starts = [sum(shape.parts[: i + 1]) // 16 if i + 1 < len(shape.parts) else 1 << 30 for i in range(2)]
    return {
        "K": shape.k,
        "ROW_SCALES": int(shape.row_scales),
        "ARGMAX": int(shape.argmax),
        "PROLOGUE": get_args(Prologue).index(shape.prologue),
        "SECOND": starts[0],
        "THIRD": starts[1],
        "USE_PDL": int(pdl),
        "TOKENS": p.tokens,
        "GRID": p.ctas,
        "WARPS": p.warps,
        "KSPLIT": p.ksplit,
        "STAGES": p.stages,
        "SHARED_BYTES": p.shared_bytes,
        "EXCHANGE_BYTES": _exchange_bytes(p.tokens, p.ctas),
    }


def _exchange_bytes(tokens: int, ctas: int) -> int:
    """A line for the epoch, and for each token and CTA two tagged words of 8 bytes."""
    return 128 + 16 * tokens * ctas


class Fp8Gemv:
    """Compiled kernels for one weight shape and 1 to 16 tokens; reused by all layers of that shape.

    With `argmax` on one stream at a time: launches that overlap would take each other's words, and might wait for ever.
    """

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
        # One for all token counts, which number their launches together. Zeroed once: see struct Exchange.
        size = _exchange_bytes(self.max_tokens, gpu.sms) if shape.argmax else 0
        self._exchange = torch.zeros(size, dtype=torch.uint8, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Sequence[torch.Tensor],
        scales: torch.Tensor | Sequence[torch.Tensor],
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: tuple[torch.Tensor, float] | None = None,
        normed: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        second: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Multiplies into `out`.

        Args:
            x: contiguous BF16 [tokens, k] (with the SwiGLU prologue [tokens, 2 k]), tokens at most `max_tokens`.
            weight: E4M3 [rows, k], or its `parts`.
            scales: float32 [rows], or [ceil(rows / 128), k / 128]; of each part.
            out: BF16 [tokens, rows]; with `argmax` int64 [tokens], the row of the largest BF16 logit, lowest on ties;
                NaN and -inf are passed over, and 0 is given where there is nothing else.
            residual: BF16 [tokens, rows] added before rounding; may be `out`.
            norm: BF16 [k] weight and epsilon of the norm prologue.
            normed: BF16 [tokens, k] that receives the normalized x, or None.
            factors: float32 [tokens, k / 128] of the gated prologue.
            second: the joined prologue's right half, BF16 [tokens, k / 2], and the weight of its norm; `x` and `norm`
                are the left half's.
        """
        p, kernel = self._kernels.pick(x.shape[0])
        y, ids = (0, out.data_ptr()) if self.shape.argmax else (out.data_ptr(), 0)
        norm_weight, eps = norm or (None, 0.0)
        x_second, norm_second = second or (None, None)
        tensors = (x, x_second, *_three(weight), *_three(scales), norm_weight, norm_second)
        tensors += (factors, normed, residual)
        values: tuple[int | float, ...] = (
            *(0 if t is None else t.data_ptr() for t in tensors),
            y,
            self._exchange.data_ptr(),
            ids,
            x.shape[0],
            self.shape.rows,
            float(eps),
        )
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kernel.launch((p.ctas, 1), 32 * p.warps, values, _TYPES, stream, self._pdl)
        return out


def _three(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [*given, *[None] * (3 - len(given))]


_TYPES = (ctypes.c_void_p,) * 16 + (ctypes.c_int,) * 2 + (ctypes.c_float,)
