# SPDX-License-Identifier: Apache-2.0
"""Quantizes a BF16 Ling checkpoint into an official format: shard by shard, in bounded memory, resumable.

Shards appear under their final name only when they are complete, and `config.json` comes last, so that an unfinished
folder is never taken for a checkpoint.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from rich.console import Console
from safetensors import safe_open

from vllm_ling.checkpoint.headers import INDEX, read_file_header, read_headers
from vllm_ling.checkpoint.quantization import quantization_section
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.validate import CheckpointFacts, validate_checkpoint
from vllm_ling.errors import LingError
from vllm_ling.quant.convert_plan import Step, encode, pack, plan
from vllm_ling.quant.convert_progress import ByteProgress, gigabytes, say
from vllm_ling.quant.convert_target import atomic, claim, release

SHARD_BYTES = 5_000_000_000
# A file beside the weights is copied up to this size: a tokenizer, not a forgotten archive.
_MAX_COMPANION = 256 * 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_Target = Literal["fp8", "fp4", "int4"]
_Head = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class _Job:
    """Everything that is known before the first byte is written."""

    src: Path
    dst: Path
    config: dict[str, Any]
    shards: dict[str, list[Step]]
    companions: tuple[Path, ...]
    manifest: dict[str, Any]


def run(
    src: Path,
    dst: Path,
    fmt: str,
    *,
    head: str = "bf16",
    resume: bool = True,
    console: Console | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `src`, quantized, into the folder `dst`, and validates the result.

    Args:
        src: folder of a BF16 Ling checkpoint.
        dst: new or empty folder, or one that an interrupted run left.
        fmt: fp8, fp4 (MXFP4 experts, the rest FP8) or int4 (experts only).
        head: how to store the output head; fp8 means E4M3 with one float32 scale per vocabulary row.
        resume: keep the finished shards of an interrupted run with the same source and options.
        shard_bytes: largest size of one output shard.

    Raises:
        LingError: unknown option, unsuitable source, target in use, too little disk space, NaN or Inf in a tensor,
            or a failed read or write. Finished shards are kept.
    """
    if fmt not in get_args(_Target):
        raise LingError(f"--format {fmt}: unknown format, expected one of {', '.join(get_args(_Target))}")
    if head not in get_args(_Head):
        raise LingError(f"--head {head}: unknown, expected bf16 or fp8")
    console = console or Console()
    _check_folders(src, dst)
    before = validate_checkpoint(src)
    if before.fmt != "bf16":
        raise LingError(f"{src}: already quantized ({before.fmt}); a BF16 checkpoint is needed")
    if before.head_scale != "none":
        raise LingError(f"{src}: lm_head.weight is already FP8; a BF16 checkpoint is needed")
    job = _prepare(src, dst, cast(_Target, fmt), cast(_Head, head), shard_bytes)
    with _disk_errors(dst):
        if reason := claim(dst, job.manifest, resume):
            say(console, f"{dst}: starting over: {reason}")
        done = {file for file in job.shards if _is_finished(job, file)}
        if done:
            say(console, f"{dst}: resuming, {len(done)} of {len(job.shards)} shards are finished")
        _check_space(job, done)
        try:
            _convert(job, done, console)
        except KeyboardInterrupt:
            say(console, f"interrupted; the finished shards stay in {dst}, --resume continues with them")
            raise
        _finish(job)
        after = validate_checkpoint(dst)
        release(dst)
    _report(console, before, after, dst)


def _check_folders(src: Path, dst: Path) -> None:
    source, target = src.resolve(), dst.resolve()
    if source == target or source in target.parents:
        raise LingError(f"{dst}: the target folder must lie outside the source {src}")
    if dst.exists() and not dst.is_dir():
        raise LingError(f"{dst}: exists and is not a folder")


def _prepare(src: Path, dst: Path, fmt: _Target, head: _Head, shard_bytes: int) -> _Job:
    config = json.loads((src / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_section(LingShape.from_config(config), fmt)
    headers = read_headers(src)
    parts = pack(plan(headers, LingShape.from_config(config), head), shard_bytes)
    shards = {f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, start=1)}
    companions = tuple(sorted(path for path in src.iterdir() if _is_companion(path)))
    weights = sorted({info.file for info in headers.values()})
    stats = {name: (src / name).stat() for name in ("config.json", *(p.name for p in companions), *weights)}
    manifest = {
        "source": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()],
        "options": {"format": fmt, "head": head, "shard_bytes": shard_bytes},
        "files": [*shards, *(path.name for path in companions), INDEX, "config.json"],
    }
    return _Job(src, dst, config, shards, companions, manifest)


def _is_companion(path: Path) -> bool:
    """Tokenizer, chat template, generation config, licence and the like."""
    if path.name.startswith(".") or path.name == "config.json" or path.name.endswith(_WEIGHTS):
        return False
    return path.is_file() and path.stat().st_size <= _MAX_COMPANION


def _is_finished(job: _Job, file: str) -> bool:
    """Whether a shard under its final name holds what is planned; one that a power loss tore is made again."""
    try:
        stored = read_file_header(job.dst / file)
    except LingError:
        return False
    planned = {o.name: (o.dtype, o.shape) for step in job.shards[file] for o in step.outputs}
    return {name: (info.dtype, info.shape) for name, info in stored.items()} == planned


def _check_space(job: _Job, done: set[str]) -> None:
    missing = [step for file, steps in job.shards.items() if file not in done for step in steps]
    need = sum(step.nbytes for step in missing) + sum(path.stat().st_size for path in job.companions)
    # Each name is written twice: in its shard's header and in the index.
    need += sum(2 * len(output.name) + 100 for step in missing for output in step.outputs)
    free = shutil.disk_usage(job.dst).free
    if need > free:
        raise LingError(f"{job.dst}: needs {gigabytes(need)} of disk space, only {gigabytes(free)} are free")


def _convert(job: _Job, done: set[str], console: Console) -> None:
    sizes = {file: sum(step.source.nbytes for step in steps) for file, steps in job.shards.items()}
    skipped = sum(sizes[file] for file in done)
    with ByteProgress(console, total=sum(sizes.values()), done=skipped) as progress:
        for number, (file, steps) in enumerate(job.shards.items(), start=1):
            if file in done:
                continue
            progress.describe(f"shard {number} of {len(sizes)}")
            with atomic(job.dst / file) as path:
                _write_shard(path, job.src, steps, progress)


def _write_shard(path: Path, src: Path, steps: list[Step], progress: ByteProgress) -> None:
    """Streams one safetensors file: the header is known from the plan, so one tensor at a time is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    # Wide elements first: every tensor then starts at a multiple of its element size.
    for output in sorted((o for step in steps for o in step.outputs), key=lambda o: -o.item_bytes):
        offsets = [begin, begin + output.nbytes]
        header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": offsets}
        begin = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, ExitStack() as stack:
        file.write(len(text).to_bytes(8, "little") + text)
        sources: dict[str, Any] = {}
        for step in steps:
            if step.source.file not in sources:
                handle = safe_open(src / step.source.file, framework="pt")
                sources[step.source.file] = stack.enter_context(handle)
            weight = sources[step.source.file].get_tensor(step.name)
            if not all(bool(torch.isfinite(bound)) for bound in weight.aminmax()):
                raise LingError(f"{src / step.source.file}: {step.name} holds NaN or Inf")
            for output, value in zip(step.outputs, encode(step.codec, weight), strict=True):
                file.seek(8 + len(text) + header[output.name]["data_offsets"][0])
                file.write(value.contiguous().view(torch.uint8).numpy().data)
            progress.advance(step.source.nbytes)


def _finish(job: _Job) -> None:
    """The files beside the shards; config.json last."""
    for companion in job.companions:
        with atomic(job.dst / companion.name) as path:
            shutil.copyfile(companion, path)
    outputs = [(file, o) for file, steps in job.shards.items() for step in steps for o in step.outputs]
    total = sum(output.nbytes for _, output in outputs)
    weight_map = dict(sorted((output.name, file) for file, output in outputs))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in ((INDEX, index), ("config.json", job.config)):
        with atomic(job.dst / name) as path:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _disk_errors(dst: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LingError(
            f"{error.filename or dst}: {error.strerror or error}; finished shards are kept"
        ) from None


def _report(console: Console, before: CheckpointFacts, after: CheckpointFacts, dst: Path) -> None:
    for role, size in sorted(before.bytes_by_role.items(), key=lambda item: -item[1]):
        say(console, f"{role:<10}{gigabytes(size):>12} -> {gigabytes(after.bytes_by_role[role]):>10}")
    total = f"{'total':<10}{gigabytes(before.total_bytes):>12} -> {gigabytes(after.total_bytes):>10}"
    say(console, f"{total} ({after.n_tensors:,} tensors, {after.fmt}) in {dst}")
    if after.head_scale == "row":
        say(console, "the FP8 head needs vllm-ling: stock vLLM reads it without its scale")
