# SPDX-License-Identifier: Apache-2.0
"""MLA decoding in the latent space on one GPU: batch, plans and launches of kernels/mla_{absorb,attend,merge}.cu."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_ling.decode import mla_prepare
from vllm_ling.decode.mla_prepare import MlaShape, MlaWeights
from vllm_ling.quant.jit import Gpu, Kernel, build
from vllm_ling.quant.kernel_family import KernelFamily

TOKEN_COUNTS = (1, 2, 4, 8)
_THREADS, _TILE, _MOST_SPLITS = 256, 32, 160
Defines = dict[str, int | str]


@dataclass(frozen=True)
class LatentWeights:
    """A layer's projections into and out of the latent space, as vLLM keeps them for its own decoding.

    `key`: BF16 [heads, nope, latent]. `value`: BF16 [heads, latent, 128]. In both, either the latent axis is contiguous
    or the other one is; the heads lie at any distance.
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def latent_contiguous(self) -> bool:
        """Which of the two."""
        return self.key.stride(2) == 1


@dataclass(frozen=True)
class MlaBatch:
    """Which keys each token sees.

    Attributes:
        cache: BF16 [blocks, block size, latent + rope], contiguous within a block.
        slots: int64 [tokens], where the tokens' own rows go; negative: nowhere.
        blocks: int32 [sequences, n], the blocks of each sequence.
        starts: int32 [sequences + 1], first token of each; tokens of no sequence see nothing and give zeros.
        lengths: int32 [sequences], keys with this step's tokens.
    """

    cache: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class MlaPlan:
    """The kernels around the attention for up to `tokens` tokens, whose keys are split over `splits` CTAs a token.

    `absorb_bytes`, `merge_bytes`: shared memory of a CTA; `shared_bytes`: the larger.
    """

    tokens: int
    splits: int
    absorb_bytes: int
    merge_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class AttendPlan:
    """The attention kernel itself, the same for any number of tokens."""

    stages: int
    shared_bytes: int


def unsupported(shape: MlaShape) -> str | None:
    """Why the kernels cannot serve this shape, or None."""
    if shape.heads > 32:
        return f"{shape.heads} heads are more than 32"
    return mla_prepare.unsupported(shape)


def weights_problem(weights: LatentWeights) -> str | None:
    """Why the kernels cannot read these projections, or None."""
    key, value = weights.key, weights.value
    if key.dtype != torch.bfloat16 or value.dtype != torch.bfloat16:
        return f"the latent projections are {key.dtype} and {value.dtype}, not BF16"
    if value.shape[2] != mla_prepare.VALUE:
        return f"heads have {value.shape[2]} values, not {mla_prepare.VALUE}"
    strides = (
        (key.stride(1), value.stride(2)) if weights.latent_contiguous else (key.stride(2), value.stride(1))
    )
    unit = (key.stride(2), value.stride(1)) if weights.latent_contiguous else (key.stride(1), value.stride(2))
    aligned = all(n % 8 == 0 for n in (*strides, key.stride(0), value.stride(0)))
    if unit != (1, 1) or not aligned or key.data_ptr() % 16 or value.data_ptr() % 16:
        return f"the latent projections are laid out as {key.stride()} and {value.stride()}"
    return None


def plan(shape: MlaShape, tokens: int, gpu: Gpu) -> MlaPlan | None:
    """The launch for up to `tokens` tokens, or None where a GPU has no clusters or too little shared memory."""
    if attend_plan(shape, gpu) is None or not gpu.has_clusters:
        return None
    splits = max(1, min(_MOST_SPLITS, gpu.sms) // tokens)
    absorb = _product(shape.nope, 128, tokens)
    merge = _product(shape.latent, mla_prepare.VALUE // 4, tokens)
    merge += 8 * shape.latent + 4 * 8 * splits + 32  # the warps' sums and factors of the splits
    most = max(absorb, merge)
    return MlaPlan(tokens, splits, absorb, merge, most) if most <= gpu.shared_bytes else None


def _product(k: int, out: int, tokens: int) -> int:
    """Bytes of mla_product.cuh's struct, the larger of its two forms."""
    weights = max(out * (k // 8 + 1), k * (out // 8 + 1))
    return 16 * weights + 4 * tokens * (k + 2 * _THREADS)


def attend_plan(shape: MlaShape, gpu: Gpu) -> AttendPlan | None:
    """The most stages, at most four, that fit into a CTA's shared memory, or None."""
    rows, stride = -(-shape.heads // 16) * 16, shape.latent + shape.rope + 8
    fixed = rows * (_TILE + 8) * (4 * 4 + 2) + 4 * rows
    for stages in (4, 3, 2):
        size = fixed + 2 * stages * _TILE * stride
        if size <= gpu.shared_bytes:
            return AttendPlan(stages, size)
    return None


def defines(shape: MlaShape, source: str, contiguous: bool, p: MlaPlan | AttendPlan, pdl: bool) -> Defines:
    """Compile-time constants of `source`; `contiguous`: see `LatentWeights`."""
    found: Defines = {"HEADS": shape.heads, "LATENT": shape.latent, "USE_PDL": int(pdl)}
    if isinstance(p, AttendPlan):
        return {**found, "ROPE": shape.rope, "STAGES": p.stages, "SHARED_BYTES": p.shared_bytes}
    found |= {"TOKENS": p.tokens, "LATENT_CONTIGUOUS": int(contiguous)}
    if source == "mla_absorb.cu":
        own = {"HIDDEN": shape.hidden, "NOPE": shape.nope, "ROPE": shape.rope, "SHARED_BYTES": p.absorb_bytes}
    else:
        own = {"VALUE": mla_prepare.VALUE, "SPLITS": p.splits, "SHARED_BYTES": p.merge_bytes}
    return found | own


def jobs(shape: MlaShape, gpu: Gpu) -> Iterator[tuple[str, str, Defines | None]]:
    """(label, source, constants) of every kernel that serving may ask for; no constants where the GPU has no room."""
    whole = attend_plan(shape, gpu)
    yield (
        "MLA attention",
        "mla_attend.cu",
        defines(shape, "mla_attend.cu", False, whole, pdl=True) if whole else None,
    )
    for tokens in TOKEN_COUNTS:
        p = plan(shape, tokens, gpu)
        for contiguous in (False, True):  # how vLLM forms the projections depends on its FP8 kernel
            for source in ("mla_absorb.cu", "mla_merge.cu"):
                label = f"MLA {source[4:-3]}, {tokens} tokens, latent {'rows' if contiguous else 'columns'}"
                yield label, source, defines(shape, source, contiguous, p, pdl=True) if p else None


class MlaAttention:
    """The compiled kernels for one shape and their scratch; reused by all its layers, on one stream.

    Attributes:
        max_tokens: the most that a call takes.
    """

    def __init__(
        self,
        shape: MlaShape,
        contiguous: bool,
        gpu: Gpu,
        device: torch.device,
        cache: Path | None,
        pdl: bool = True,
    ) -> None:
        """Compiles the kernels or takes them from `cache`.

        Raises:
            CompileError: with the compiler's log.
            ValueError: the shape or the GPU is not supported.
        """
        if reason := unsupported(shape):
            raise ValueError(reason)
        whole, plans = attend_plan(shape, gpu), [plan(shape, tokens, gpu) for tokens in TOKEN_COUNTS]
        if whole is None:
            raise ValueError(f"{gpu.shared_bytes} bytes of shared memory are too few for {shape}")

        def family(source: str) -> KernelFamily[MlaPlan]:
            return KernelFamily(
                source, shape, plans, lambda p: defines(shape, source, contiguous, p, pdl), gpu, cache
            )

        self._absorb, self._merge = family("mla_absorb.cu"), family("mla_merge.cu")
        built = build(
            "mla_attend.cu", defines(shape, "mla_attend.cu", contiguous, whole, pdl), gpu.arch, cache
        )
        self._attend = Kernel(built.cubin, "mla_attend", whole.shared_bytes)
        self.shape, self._contiguous, self._pdl = shape, contiguous, pdl
        self.max_tokens = self._absorb.max_tokens
        rows = max(p.tokens * p.splits for p in self._absorb.plans) * shape.heads
        self._query = torch.empty(
            self.max_tokens, shape.heads, shape.latent + shape.rope, dtype=torch.bfloat16, device=device
        )
        self._sums = torch.empty(rows, shape.latent, dtype=torch.float32, device=device)
        self._peaks = torch.empty(rows, 2, dtype=torch.float32, device=device)

    @property
    def query(self) -> torch.Tensor:
        """BF16 [max_tokens, heads, latent + rope]: the last call's queries, in the latent space and rotated."""
        return self._query

    def __call__(
        self,
        projected: torch.Tensor,
        normed: torch.Tensor,
        positions: torch.Tensor,
        w: MlaWeights,
        latent: LatentWeights,
        batch: MlaBatch,
        scale: float,
        gate: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the tokens' rows of the cache, attends, and fills `gate` and `out`.

        Args:
            projected: BF16 [tokens, sum(shape.projected)]: queries, latent, key.
            normed: BF16 [tokens, hidden], the input of that projection; gives the gate.
            positions: int64 [tokens].
            w: the layer's small weights.
            latent: its projections, laid out as the kernels were compiled for.
            batch: its cache and sequences.
            scale: of the scores.
            gate: float32 [tokens, heads], the factor of each head's output, not applied here.
            out: BF16 [tokens, heads * 128].
        """
        tokens, stream = projected.shape[0], torch.cuda.current_stream(projected.device).cuda_stream
        heads, cache, sequences = self.shape.heads, batch.cache, batch.lengths.shape[0]
        axes = (1, 2) if self._contiguous else (2, 1)
        p, absorb = self._absorb.pick(tokens)
        tensors = (projected, normed, positions, w.cos_sin, w.latent_norm, w.gate, latent.key)
        values: tuple[int | float, ...] = tuple(
            t.data_ptr() for t in (*tensors, batch.slots, self._query, cache, gate)
        )
        values += (latent.key.stride(0), latent.key.stride(axes[0]), cache.stride(0))
        values += (cache.shape[1], tokens, float(w.eps))
        parts = self.shape.latent // 128
        absorb.launch((heads * parts, 1), _THREADS, values, _ABSORB, stream, self._pdl)

        keys = (self._query, cache, batch.blocks, batch.starts, batch.lengths, self._sums, self._peaks)
        values = tuple(t.data_ptr() for t in keys)
        values += (cache.stride(0), batch.blocks.stride(0), cache.shape[1], sequences)
        values += (scale * _LOG2_E,)
        self._attend.launch((p.splits, tokens), _THREADS, values, _ATTEND, stream, self._pdl)

        _, merge = self._merge.pick(tokens)
        parts_of = (self._sums, self._peaks, latent.value, batch.starts, batch.lengths, out)
        values = tuple(t.data_ptr() for t in parts_of)
        values += (latent.value.stride(0), latent.value.stride(axes[1]), sequences, tokens)
        merge.launch((heads * 4, 1), _THREADS, values, _MERGE, stream, self._pdl, cluster=4)
        return out


_LOG2_E = 1.4426950408889634
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float
_ABSORB = (*(_POINTER,) * 11, *(_LONG,) * 3, *(_INT,) * 2, _FLOAT)
_ATTEND = (*(_POINTER,) * 7, _LONG, *(_INT,) * 3, _FLOAT)
_MERGE = (*(_POINTER,) * 6, *(_LONG,) * 2, *(_INT,) * 2)
