# SPDX-License-Identifier: Apache-2.0
"""What lies between an MLA layer's first projection and its attention: shape and launch of kernels/mla_prepare.cu."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_ling.quant.jit import Gpu, Kernel, build

VALUE = 128  # outputs of a head
_WARPS = 4


@dataclass(frozen=True)
class MlaShape:
    """One layer's dimensions: `nope` and `rope` of a head's query, `latent` of the cache."""

    heads: int
    hidden: int
    nope: int = 128
    rope: int = 64
    latent: int = 512

    @property
    def projected(self) -> tuple[int, int]:
        """Rows of the first projection: queries; latent and key."""
        return self.heads * (self.nope + self.rope), self.latent + self.rope


@dataclass(frozen=True)
class MlaWeights:
    """`latent_norm`: BF16 [latent]; `gate`: BF16 [heads, hidden]; `cos_sin`: BF16 [positions, rope]."""

    latent_norm: torch.Tensor
    gate: torch.Tensor
    cos_sin: torch.Tensor
    eps: float


@dataclass(frozen=True)
class MlaInputs:
    """What attention reads. `query`: BF16 [tokens, heads, nope + rope]; `latent`: BF16 [tokens, latent]; `key`: BF16
    [tokens, 1, rope]; `gate`: float32 [tokens, heads], the factor of each head's output."""

    query: torch.Tensor
    latent: torch.Tensor
    key: torch.Tensor
    gate: torch.Tensor


def unsupported(shape: MlaShape) -> str | None:
    """Why the kernel cannot serve this shape, or None."""
    rules = (
        (shape.rope == 64, f"rotary dimension {shape.rope} is not 64"),
        (shape.nope % 64 == 0, f"query dimension {shape.nope} is not a multiple of 64"),
        (shape.latent % 128 == 0, f"latent dimension {shape.latent} is not a multiple of 128"),
        (shape.heads % _WARPS == 0, f"{shape.heads} heads are not a multiple of {_WARPS}"),
        (shape.hidden % 256 == 0, f"hidden size {shape.hidden} is not a multiple of 256"),
    )
    return next((reason for holds, reason in rules if not holds), None)


def defines(shape: MlaShape, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of mla_prepare.cu."""
    return {
        "HEADS": shape.heads,
        "HIDDEN": shape.hidden,
        "NOPE": shape.nope,
        "ROPE": shape.rope,
        "LATENT": shape.latent,
        "USE_PDL": int(pdl),
    }


class MlaPrepare:
    """The compiled kernel for one shape; used by all layers."""

    def __init__(self, shape: MlaShape, gpu: Gpu, cache: Path | None, pdl: bool = True) -> None:
        """Compiles the kernel or takes it from `cache`.

        Raises:
            CompileError: with the compiler's log.
            ValueError: the shape is not supported.
        """
        if reason := unsupported(shape):
            raise ValueError(reason)
        built = build("mla_prepare.cu", defines(shape, pdl), gpu.arch, cache)
        self._kernel = Kernel(built.cubin, "mla_prepare")
        self.shape, self.origin, self._pdl = shape, built.origin, pdl

    def __call__(
        self,
        projected: torch.Tensor,
        normed: torch.Tensor,
        positions: torch.Tensor,
        w: MlaWeights,
        into: MlaInputs,
    ) -> MlaInputs:
        """Fills `into`.

        Args:
            projected: BF16 [tokens, sum(shape.projected)]: queries, latent, key.
            normed: BF16 [tokens, hidden], the input of that projection; gives the gate.
            positions: int64 [tokens].
            w: the layer.
            into: see `MlaInputs`; contiguous.
        """
        outputs = (into.query, into.latent, into.key, into.gate)
        tensors = (projected, normed, positions, w.cos_sin, w.latent_norm, w.gate, *outputs)
        values = (*(t.data_ptr() for t in tensors), float(w.eps))
        stream = torch.cuda.current_stream(projected.device).cuda_stream
        grid = (1 + self.shape.heads // _WARPS, projected.shape[0])
        self._kernel.launch(grid, 32 * _WARPS, values, _TYPES, stream, self._pdl)
        return into


_TYPES = (*(ctypes.c_void_p,) * 10, ctypes.c_float)
