# SPDX-License-Identifier: Apache-2.0
"""KDA between its projections on one GPU: shape, weights, batch and launch of kernels/kda_step.cu."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.kernel_family import KernelFamily

TOKEN_COUNTS = (1, 2, 4, 8)
_DIM, _SPLIT, _THREADS = 128, 4, 256


@dataclass(frozen=True)
class KdaShape:
    """One layer's dimensions; heads of 128 channels. `safe_gate`: the decay is bounded (kda_safe_gate)."""

    heads: int
    hidden: int
    safe_gate: bool = True


@dataclass(frozen=True)
class KdaWeights:
    """Device tensors of one layer, as vLLM holds them.

    `b`: BF16 [heads, hidden]. `q_conv`, `k_conv`, `v_conv`: float32 [heads * 128, 4]. `a_log`: float32 [heads].
    `dt_bias`: float32 [heads * 128]. `o_norm`: BF16 [128]. `eps`: of that norm.
    """

    b: torch.Tensor
    q_conv: torch.Tensor
    k_conv: torch.Tensor
    v_conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
    eps: float
    lower_bound: float


@dataclass(frozen=True)
class KdaStates:
    """A layer's state pool. `conv`: BF16 [slots, 3 * heads * 128, 3 or more], any strides; `recurrent`: float32
    [slots, heads, 128 (value), 128 (key)], contiguous within a slot."""

    conv: torch.Tensor
    recurrent: torch.Tensor


@dataclass(frozen=True)
class KdaBatch:
    """Which tokens belong to which sequence, and where their states lie.

    Attributes:
        slots: int32 [sequences] without drafts, else [sequences, k + 1]; 0 or less is a padded sequence.
        starts: int32 [sequences + 1] first token of each sequence, or None: one token each.
        accepted: int32 [sequences] tokens accepted in the step before, or None.
        longest: most tokens of a sequence.
    """

    slots: torch.Tensor
    starts: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    longest: int = 1


@dataclass(frozen=True)
class KdaPlan:
    """A kernel for sequences of up to `tokens` tokens."""

    tokens: int
    shared_bytes: int = 0  # static


def unsupported(shape: KdaShape) -> str | None:
    """Why the kernel cannot serve this shape, or None."""
    return f"hidden size {shape.hidden} is odd" if shape.hidden % 2 else None


def plan(shape: KdaShape, tokens: int, gpu: Gpu) -> KdaPlan | None:
    """The launch for sequences of up to `tokens` tokens, or None where a GPU has no clusters."""
    return KdaPlan(tokens) if gpu.has_clusters else None


def defines(shape: KdaShape, p: KdaPlan, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of kda_step.cu."""
    return {
        "HEADS": shape.heads,
        "HIDDEN": shape.hidden,
        "TOKENS": p.tokens,
        "SAFE_GATE": int(shape.safe_gate),
        "USE_PDL": int(pdl),
    }


class KdaStep:
    """The compiled kernels for one shape; used by all layers."""

    def __init__(self, shape: KdaShape, gpu: Gpu, cache: Path | None, pdl: bool = True) -> None:
        """Compiles (or takes from `cache`) one kernel per entry of TOKEN_COUNTS.

        Raises:
            CompileError: with the compiler's log.
            ValueError: the shape or the GPU is not supported.
        """
        if reason := unsupported(shape):
            raise ValueError(reason)
        plans = [plan(shape, tokens, gpu) for tokens in TOKEN_COUNTS]
        self._kernels = KernelFamily(
            "kda_step.cu", shape, plans, lambda p: defines(shape, p, pdl), gpu, cache
        )
        self.shape, self._pdl = shape, pdl
        self.origins, self.max_tokens = self._kernels.origins, self._kernels.max_tokens

    def __call__(
        self,
        projected: torch.Tensor,
        normed: torch.Tensor,
        w: KdaWeights,
        states: KdaStates,
        batch: KdaBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Advances the states and writes what the output projection multiplies.

        Args:
            projected: BF16 [tokens, 5 * heads * 128]: q, k, v, f, g before convolution and gate.
            normed: BF16 [tokens, hidden], the input of those projections; gives beta.
            w: the layer.
            states: updated in place.
            batch: its sequences.
            out: BF16 [tokens, heads * 128].
        """
        _, kernel = self._kernels.pick(batch.longest)
        conv, recurrent = states.conv, states.recurrent
        layer = (w.b, w.q_conv, w.k_conv, w.v_conv, w.a_log, w.dt_bias, w.o_norm)
        tensors = (projected, normed, *layer, conv, recurrent, batch.slots)
        values: tuple[int | float, ...] = tuple(t.data_ptr() for t in tensors)
        values += tuple(0 if t is None else t.data_ptr() for t in (batch.starts, batch.accepted))
        values += (out.data_ptr(), *conv.stride(), recurrent.stride(0))
        values += (batch.slots.stride(0), float(w.lower_bound), float(w.eps))
        stream = torch.cuda.current_stream(projected.device).cuda_stream
        grid = (self.shape.heads * _SPLIT, batch.slots.shape[0])
        kernel.launch(grid, _THREADS, values, _TYPES, stream, self._pdl, cluster=_SPLIT)
        return out


_TYPES = (
    *(ctypes.c_void_p,) * 15,
    *(ctypes.c_longlong,) * 4,
    ctypes.c_int,
    *(ctypes.c_float,) * 2,
)
