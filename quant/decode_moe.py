# SPDX-License-Identifier: Apache-2.0
"""The MoE block kernel on one GPU: what it is compiled for, its buffers, its launch."""

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.kernel_family import KernelFamily

TOKEN_COUNTS = (1, 2, 4, 8)
_PIECE_BYTES, _SUM_STRIDE, _SHARED_PARTS = 2176, 132, 3


@dataclass(frozen=True)
class MoEShape:
    """One layer's dimensions."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    shared_intermediate: int = 0
    gate_bf16: bool = False

    @property
    def shared(self) -> int:
        """Intermediate size of the shared expert; 0 in the field means the routed experts' size."""
        return self.shared_intermediate or self.intermediate


@dataclass(frozen=True)
class MoEWeights:
    """Device tensors of one layer. Experts in `layout` order; the shared expert as stored, its scales float32.

    `gate` is float32 or, with `gate_bf16`, bfloat16 [experts, hidden]; `bias` float32 [experts].
    """

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


@dataclass(frozen=True)
class MoEPlan:
    """How the kernel for up to `tokens` tokens is compiled for a GPU; sizes in bytes."""

    tokens: int
    ctas: int
    warps: int
    stages: int
    act_pieces: int = 0
    scratch_bytes: int = 0
    shared_bytes: int = 0


def unsupported(shape: MoEShape) -> str | None:
    """Why the kernel cannot serve this shape, or None."""
    sizes = (
        ("hidden size", shape.hidden),
        ("intermediate size", shape.intermediate),
        ("shared intermediate size", shape.shared),
    )
    per_group = shape.experts // shape.groups
    bad = next((f"{name} {size} is not a multiple of 128" for name, size in sizes if size % 128), None)
    rules = (
        (
            shape.experts % 32 == 0 and shape.experts <= 1024,
            f"{shape.experts} experts: not a multiple of 32 up to 1024",
        ),
        (
            shape.experts % shape.groups == 0 and (per_group % 32 == 0 or per_group in (2, 4, 8, 16)),
            f"{shape.groups} groups of {shape.experts} experts: not of a power of two or a multiple of 32",
        ),
        (shape.groups <= 32, f"{shape.groups} expert groups are more than 32"),
        (shape.top_k <= 15, f"top-{shape.top_k} routing exceeds 15"),
        (
            shape.top_k <= shape.top_groups * per_group,
            f"top-{shape.top_k} routing of {shape.top_groups} groups of {per_group} experts",
        ),
    )
    return bad or next((reason for holds, reason in rules if not holds), None)


def plan(shape: MoEShape, tokens: int, gpu: Gpu) -> MoEPlan | None:
    """The widest configuration that fits into a CTA's shared memory, or None; `tokens` is one of TOKEN_COUNTS.

    Two stages for each of 16 warps keep an H200's memory busy (three were slower); fewer warps need more of them.
    """
    for warps, stages in ((16, 2), (8, 4), (8, 3), (4, 4), (4, 3)):
        for roomy in (True, False):
            found = _sizes(shape, tokens, gpu, MoEPlan(tokens, gpu.sms, warps, stages), roomy)
            if found.shared_bytes <= gpu.shared_bytes and _covers(shape, tokens, found):
                return found
    return None


def _covers(shape: MoEShape, tokens: int, p: MoEPlan) -> bool:
    """Whether the CTA's threads and the warps' sums are enough for their secondary jobs (asserted in moe_shape.cuh)."""
    items = _quota(2 * shape.shared // 16, shape.hidden // 128, p.ctas)
    fp8_x = 2 * tokens * (shape.hidden + 8)
    return (
        tokens * shape.top_k <= 32 * p.warps
        and 16 * items <= p.warps * _SUM_STRIDE
        and fp8_x <= p.warps * p.stages * _PIECE_BYTES
    )


def _group(blocks: int) -> int:
    """How many warps take neighbouring row blocks."""
    return next(n for n in (4, 2, 1) if blocks % n == 0)


def _quota(tiles: int, items: int, ctas: int) -> int:
    return max(-(-tiles * items // ctas), -(-items // 2))


def _sizes(shape: MoEShape, tokens: int, gpu: Gpu, p: MoEPlan, roomy: bool) -> MoEPlan:
    unique, blocks, out_blocks = (
        min(tokens * shape.top_k, shape.experts),
        shape.intermediate // 64,
        shape.hidden // 64,
    )
    up_units, down_units = blocks // _group(blocks), out_blocks // _group(out_blocks)
    up_steps = shape.hidden // 32
    least = -(-shape.top_k * up_units * up_steps // gpu.sms)
    most_parts = max(
        used * (1 - (-up_steps // max(-(-used * up_units * up_steps // gpu.sms), least)))
        for used in range(1, unique + 1)
    )
    down_parts = -(-gpu.sms // down_units) + 1
    words = (
        16,  # the epoch, in a line of its own as every array is
        max(gpu.sms - -(-shape.experts // -(-shape.experts // gpu.sms)), 1),
        tokens * shape.experts,
        2 * shape.shared * _SHARED_PARTS * tokens,
        tokens * shape.shared // 2,
        shape.hidden * _SHARED_PARTS * tokens,
        most_parts * blocks * tokens * 128,
        out_blocks * down_parts * tokens * 64,
    )
    scratch_bytes = sum(-(-8 * count // 128) * 128 for count in words)
    # Activations lie where x was. Roomy: the average share of a CTA and half as much again, so that one round does.
    shared_act = 2 * tokens * (shape.shared + 8)
    average = -(-tokens * shape.top_k * blocks * down_units // gpu.sms)
    x_bytes = 2 * tokens * (shape.hidden + 32)
    act_pieces = max(average * 3 // 2 if roomy else 0, (x_bytes - shared_act - 32) // 132, tokens)
    per_group = min(32, shape.experts // shape.groups)
    lists = 10 * shape.experts + 8 * shape.experts // per_group + 8 * shape.top_k
    items = _quota(shape.hidden // 16, shape.shared // 128, gpu.sms)
    routing = 4 * shape.experts + 12 * (tokens * shape.top_k + 3) + shape.experts // 8 + 4 * tokens + 4
    schedule = 8 + 4 * unique * (3 + tokens) + 28 * (unique + 1)
    shared_bytes = (
        max(p.warps * p.stages * _PIECE_BYTES, tokens * lists)
        + max(x_bytes, 132 * act_pieces + shared_act + 32)
        + 4 * tokens * p.warps * _SUM_STRIDE
        + routing
        + schedule
        + 64 * items * tokens
        + 64
    )
    return replace(p, act_pieces=act_pieces, scratch_bytes=scratch_bytes, shared_bytes=shared_bytes)


def finishers(p: MoEPlan) -> int:
    """CTAs that add up the output; the rest of the GPU is then free for the next launch."""
    return -(-p.ctas // 2)


def defines(shape: MoEShape, p: MoEPlan, pdl: bool) -> dict[str, int | str]:
    """Compile-time constants of moe_block.cu."""
    return {
        "HIDDEN": shape.hidden,
        "INTER": shape.intermediate,
        "SHARED_INTER": shape.shared,
        "EXPERTS": shape.experts,
        "TOP_K": shape.top_k,
        "GROUPS": shape.groups,
        "TOP_GROUPS": shape.top_groups,
        "GATE_TYPE": "bf16_t" if shape.gate_bf16 else "float",
        "USE_PDL": int(pdl),
        "TOKENS": p.tokens,
        "GRID": p.ctas,
        "FINISHERS": finishers(p),
        "WARPS": p.warps,
        "STAGES": p.stages,
        "ACT_PIECES": p.act_pieces,
        "SCRATCH_BYTES": p.scratch_bytes,
        "SHARED_BYTES": p.shared_bytes,
    }


class MoEDecoder:
    """The compiled kernels and their scratch for one layer shape; reused by all its layers, on one stream at a time."""

    def __init__(
        self, shape: MoEShape, gpu: Gpu, device: torch.device, cache: Path | None, pdl: bool = True
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
            "moe_block.cu", shape, plans, lambda p: defines(shape, p, pdl), gpu, cache
        )
        self.shape, self._pdl = shape, pdl
        self.origins, self.max_tokens = self._kernels.origins, self._kernels.max_tokens
        # One buffer per token count, as each kernel counts its launches in its own. Zeroed once: see struct Scratch.
        self._scratch = {
            p.tokens: torch.zeros(p.scratch_bytes, dtype=torch.uint8, device=device)
            for p in self._kernels.plans
        }

    def __call__(
        self,
        x: torch.Tensor,
        w: MoEWeights,
        out: torch.Tensor,
        scaling: float,
        limit: float,
        shared_limit: float,
        residual: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        topk: tuple[torch.Tensor, torch.Tensor] | None = None,
        norm: tuple[torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        """Routed plus shared experts of `x` (BF16 [tokens, hidden]) plus `residual` into `out`.

        Args:
            x: contiguous BF16 [tokens, hidden], tokens at most `max_tokens`.
            w: the layer.
            out: BF16 [tokens, hidden]; may be `x` or `residual`: both have been read when it is written.
            scaling: factor of the renormalized routing weights.
            limit: SwiGLU clamp of the routed experts; 0 means none.
            shared_limit: the same of the shared expert.
            residual: BF16 [tokens, hidden] added to the sum, or None.
            expert_map: int32 [experts], global expert to local one, negative where another rank has it; or None.
            topk: (float32, int32) [tokens, top_k] that receive the routing, or None.
            norm: BF16 [hidden] weight and epsilon of an RMSNorm of `x` before the block, or None.
        """
        tokens = x.shape[0]
        p, kernel = self._kernels.pick(tokens)
        weights, ids = topk or (None, None)
        tensors = (
            *(x, residual, w.gate, w.bias, expert_map, w.w13, w.s13, w.w2, w.s2),
            *(
                w.shared_w13,
                w.shared_s13,
                w.shared_w2,
                w.shared_s2,
                self._scratch[p.tokens],
                out,
                weights,
                ids,
            ),
        )
        norm_weight, eps = norm or (None, 0.0)
        values: tuple[Any, ...] = tuple(0 if t is None else t.data_ptr() for t in (*tensors, norm_weight))
        values += (tokens, float(scaling), float(limit), float(shared_limit), float(eps))
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kernel.launch((p.ctas, 1), 32 * p.warps, values, _TYPES, stream, self._pdl)
        return out


_TYPES = (ctypes.c_void_p,) * 18 + (ctypes.c_int,) + (ctypes.c_float,) * 4
