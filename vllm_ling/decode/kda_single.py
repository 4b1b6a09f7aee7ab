# SPDX-License-Identifier: Apache-2.0
"""KDA of a single sequence up to its output projection on one GPU: plan and launch of kernels/kda_single.cu."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_ling.decode.kda_step import TOKEN_COUNTS, KdaBatch, KdaShape, KdaStates, KdaWeights
from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.kernel_family import KernelFamily

_WARPS, _SPLIT, _BLOCK_BYTES = 10, 4, 2048


@dataclass(frozen=True)
class KdaSinglePlan:
    """A kernel for up to `tokens` tokens; `stages` blocks of each warp are on their way. Sizes in bytes."""

    tokens: int
    stages: int
    shared_bytes: int


def unsupported(shape: KdaShape) -> str | None:
    """Why the kernel cannot serve this shape, or None."""
    return f"hidden size {shape.hidden} is not a multiple of 128" if shape.hidden % 128 else None


def plan(shape: KdaShape, tokens: int, gpu: Gpu) -> KdaSinglePlan | None:
    """The deepest ring of two to four stages that fits, or None: no room, or no clusters."""
    if int(gpu.arch.removeprefix("sm_").rstrip("af")) < 90:
        return None
    step = 4 * (3 * 128 + 32 + 8 + 5 + 32 + 4 + 1)
    token = 2 * (shape.hidden + 8) + step + 4 * 5 * 32 + 4 * (shape.hidden // 128)
    for stages in (4, 3, 2):
        size = _WARPS * stages * _BLOCK_BYTES + tokens * token + 64
        if size <= gpu.shared_bytes:
            return KdaSinglePlan(tokens, stages, size)
    return None


def defines(shape: KdaShape, p: KdaSinglePlan, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of kda_single.cu."""
    return {
        "HEADS": shape.heads,
        "HIDDEN": shape.hidden,
        "TOKENS": p.tokens,
        "SAFE_GATE": int(shape.safe_gate),
        "STAGES": p.stages,
        "SHARED_BYTES": p.shared_bytes,
        "USE_PDL": int(pdl),
    }


class KdaSingle:
    """The compiled kernels for one shape; used by all layers."""

    def __init__(self, shape: KdaShape, gpu: Gpu, cache: Path | None, pdl: bool = True) -> None:
        """Compiles (or takes from `cache`) one kernel per entry of TOKEN_COUNTS that the GPU has room for.

        Raises:
            CompileError: with the compiler's log.
            ValueError: the shape or the GPU is not supported.
        """
        if reason := unsupported(shape):
            raise ValueError(reason)
        plans = [plan(shape, tokens, gpu) for tokens in TOKEN_COUNTS]
        self._kernels = KernelFamily(
            "kda_single.cu", shape, plans, lambda p: defines(shape, p, pdl), gpu, cache
        )
        self.shape, self._pdl = shape, pdl
        self.origins, self.max_tokens = self._kernels.origins, self._kernels.max_tokens

    def __call__(
        self,
        x: torch.Tensor,
        norm: tuple[torch.Tensor, float],
        weight: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        w: KdaWeights,
        states: KdaStates,
        batch: KdaBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Advances the states and writes what the output projection multiplies.

        Args:
            x: BF16 [tokens, hidden], tokens at most `max_tokens`.
            norm: BF16 [hidden] weight and epsilon of the norm before the projections.
            weight: E4M3 [3 * wide, hidden], [wide, hidden], [wide, hidden] (wide = heads * 128): q, k, v; f; g.
            scales: their float32 scales by 128x128 block.
            w: the rest of the layer.
            states: updated in place.
            batch: one sequence.
            out: BF16 [tokens, wide].
        """
        _, kernel = self._kernels.pick(x.shape[0])
        conv, recurrent = states.conv, states.recurrent
        layer = (w.b, w.q_conv, w.k_conv, w.v_conv, w.a_log, w.dt_bias, w.o_norm)
        tensors = (x, norm[0], *weight, *scales, *layer, conv, recurrent, batch.slots)
        values: tuple[int | float, ...] = tuple(t.data_ptr() for t in tensors)
        values += tuple(0 if t is None else t.data_ptr() for t in (batch.starts, batch.accepted))
        values += (out.data_ptr(), *conv.stride(), recurrent.stride(0), x.shape[0])
        values += (float(w.lower_bound), float(norm[1]), float(w.eps))
        stream = torch.cuda.current_stream(x.device).cuda_stream
        grid = (self.shape.heads * _SPLIT, 1)
        kernel.launch(grid, 32 * _WARPS, values, _TYPES, stream, self._pdl, cluster=_SPLIT)
        return out


_TYPES = (
    *(ctypes.c_void_p,) * 21,
    *(ctypes.c_longlong,) * 4,
    ctypes.c_int,
    *(ctypes.c_float,) * 3,
)
