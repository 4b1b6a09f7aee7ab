# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling tune`: builds the kernels that a model will ask for, before a server has to.

NVRTC needs no GPU, so the kernels of a known card can be built anywhere. A shape that is missing here only costs the
server its compilation at the first start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.decode import kda_step, mla_attention, mla_prepare
from vllm_ling.decode.kda_step import KdaShape
from vllm_ling.decode.shapes import fused_problem, fused_shapes
from vllm_ling.errors import LingError
from vllm_ling.quant import decode_moe, fp8_gemv
from vllm_ling.quant.decode_moe import MoEShape
from vllm_ling.quant.fp8_gemv import GemvShape
from vllm_ling.quant.jit import CompileError, Gpu, build, default_cache, gpu_of

# Multiprocessors, and the shared memory in bytes that a CTA may use.
GPUS = {
    "h100": Gpu("sm_90a", 132, 227 * 1024),
    "h200": Gpu("sm_90a", 132, 227 * 1024),
    "gb10": Gpu("sm_121a", 48, 99 * 1024),
    "rtx-pro-6000": Gpu("sm_120a", 188, 99 * 1024),
}


@dataclass(frozen=True)
class Job:
    """One kernel to build; without defines, `problem` says why this GPU cannot have it."""

    label: str
    source: str
    defines: dict[str, int | str] | None
    problem: str = ""


def moe_shape(shape: LingShape) -> MoEShape:
    """The MoE block of a model on one GPU."""
    return MoEShape(
        hidden=shape.hidden_size,
        intermediate=shape.moe_intermediate_size,
        experts=shape.num_experts,
        top_k=shape.num_experts_per_tok,
        groups=shape.n_group,
        top_groups=shape.topk_group,
        shared_intermediate=shape.shared_intermediate_size,
    )


def gemv_shapes(shape: LingShape) -> list[GemvShape]:
    """The matrices that decoding multiplies by, as vLLM merges them on one GPU; each distinct one once."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    wide = heads * shape.head_dim
    rows_k = [
        (3 * wide, hidden),  # q, k, v of KDA
        (wide, hidden),  # its f and g
        (hidden, wide),  # its o
        (hidden, heads * shape.v_head_dim),  # o of MLA
        (2 * shape.intermediate_size, hidden),
        (hidden, shape.intermediate_size),
    ]
    query = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    latent = shape.kv_lora_rank + shape.qk_rope_head_dim
    if shape.q_lora_rank is None:
        rows_k += [(query, hidden), (latent, hidden)]
    else:
        rows_k += [(shape.q_lora_rank + latent, hidden), (query, shape.q_lora_rank)]
    if shape.num_nextn_predict_layers:
        rows_k.append((hidden, 2 * hidden))
    head = GemvShape(-(-shape.vocab_size // 64) * 64, hidden, row_scales=True)  # vLLM pads the vocabulary
    return [*dict.fromkeys(GemvShape(rows, k, row_scales=False) for rows, k in rows_k), head]


def jobs(shape: LingShape, gpu: Gpu) -> Iterator[Job]:
    """Everything to build for a model, with programmatic dependent launch as in serving."""
    if shape.fmt == "fp4":
        yield from _jobs("MoE block", "moe_block.cu", decode_moe, moe_shape(shape), gpu)
    for matrix in gemv_shapes(shape):
        yield from _jobs(f"FP8 {matrix.rows} x {matrix.k}", "fp8_gemv.cu", fp8_gemv, matrix, gpu)
    yield from _fused_jobs(shape, gpu)


def _fused_jobs(shape: LingShape, gpu: Gpu) -> Iterator[Job]:
    """What only the fused path asks for; it has other prologues before the same matrices."""
    if problem := fused_problem(shape):
        yield Job("fused decode path", "", None, problem)
        return
    asked = fused_shapes(shape)
    for matrix in asked.gemv:
        label = f"FP8 {matrix.rows} x {matrix.k}, prologue {matrix.prologue}"
        yield from _jobs(label, "fp8_gemv.cu", fp8_gemv, matrix, gpu)
    yield from _jobs("KDA step", "kda_step.cu", kda_step, asked.kda, gpu)
    yield Job("MLA inputs", "mla_prepare.cu", mla_prepare.defines(asked.mla, pdl=True))
    if reason := mla_attention.unsupported(asked.mla):
        yield Job("MLA attention", "", None, reason)
        return
    for label, source, constants in mla_attention.jobs(asked.mla, gpu):
        yield Job(label, source, constants, "" if constants else "too little shared memory (or no clusters)")


def _jobs(
    what: str, source: str, planner: Any, shape: MoEShape | GemvShape | KdaShape, gpu: Gpu
) -> Iterator[Job]:
    """One kernel per token count; `planner` is the module beside the kernel, which plans its launches."""
    reason = planner.unsupported(shape)
    for tokens in planner.TOKEN_COUNTS:
        label, plan = f"{what}, {tokens} tokens", None if reason else planner.plan(shape, tokens, gpu)
        if plan is None:
            yield Job(label, source, None, reason or "too little shared memory (or no clusters)")
        else:
            yield Job(label, source, planner.defines(shape, plan, pdl=True))


def run(model: str, gpu_name: str | None) -> int:
    """The command: builds into the user's cache and reports. Returns the exit code.

    Raises:
        LingError: unknown model or GPU, no GPU and no `gpu_name`, a format without our kernels, a kernel that does not
            build, or a cache that cannot be written.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vllm_ling.roofline.models import model_shape

    shape = model_shape(model)
    if shape.fmt not in ("fp4", "fp8"):
        raise LingError(f"tune: {model} is {shape.fmt}; our GPU kernels are for FP4 and FP8 checkpoints")
    gpu, cache = _gpu(gpu_name), default_cache()
    console, compiled, cached = Console(), 0, 0
    # Matrices of the same width share kernels.
    todo = list({(job.source, str(job.defines or job.label)): job for job in jobs(shape, gpu)}.values())
    with Progress(console=console) as progress:
        bar = progress.add_task("kernels", total=len(todo))
        for job in todo:
            progress.update(bar, description=job.label)
            if job.defines is None:
                console.print(f"left out: {job.label}: {job.problem}")
            else:
                built = _build(job, gpu, cache)
                compiled, cached = compiled + (built != "cache"), cached + (built == "cache")
            progress.advance(bar)
    console.print(f"{gpu.arch}: {compiled} kernels compiled, {cached} were there; cache {cache}")
    return 0


def _gpu(name: str | None) -> Gpu:
    if name is not None:
        if name not in GPUS:
            raise LingError(f"--gpu {name}: not one of {', '.join(GPUS)}; leave it out for the GPU at hand")
        return GPUS[name]
    import torch

    if not torch.cuda.is_available():
        raise LingError(f"tune: torch sees no CUDA device; name a card with --gpu ({', '.join(GPUS)})")
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


def _build(job: Job, gpu: Gpu, cache: Path) -> str:
    assert job.defines is not None
    try:
        origin = build(job.source, job.defines, gpu.arch, cache).origin
    except CompileError as error:
        raise LingError(f"tune: {job.label}: {error}") from None
    except ImportError as error:
        raise LingError(
            f"tune: NVRTC is missing ({error}); install cuda-bindings and nvidia-cuda-nvrtc"
        ) from None
    if origin not in ("cache", "compiled"):
        raise LingError(f"tune: {cache} cannot be written ({origin}); set VLLM_LING_CACHE_DIR")
    return origin
