# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA kernels at run time for one GPU and one shape, and keeps the binaries.

A cache entry is one file per (sources, defines, architecture, compiler): a JSON line with the key and a checksum, then
the binary. Entries are written under a temporary name and renamed, so two servers may start at once; an entry that is
damaged or belongs to another key is rebuilt; a cache that cannot be written is done without.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "kernels"
CACHE_VERSION = 1


class CompileError(RuntimeError):
    """NVRTC refused the source; the message holds its log."""


@dataclass(frozen=True)
class Gpu:
    """What kernels are planned for: architecture ("sm_90a"), multiprocessors, shared memory a CTA may use in bytes."""

    arch: str
    sms: int
    shared_bytes: int

    @property
    def has_clusters(self) -> bool:
        """Whether CTAs can share memory."""
        return int(self.arch.removeprefix("sm_").rstrip("af")) >= 90


def gpu_of(device: Any) -> Gpu:
    """The facts of a CUDA device (a `torch.device`)."""
    import torch

    facts: Any = torch.cuda.get_device_properties(device)
    return Gpu(
        f"sm_{facts.major}{facts.minor}a",
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,
    )


@dataclass(frozen=True)
class Built:
    """A kernel binary and where it came from: "compiled", "cache", or "compiled (cache: why not stored)"."""

    cubin: bytes
    origin: str


def default_cache() -> Path:
    """The user's cache folder, versioned so that a new layout never meets old entries."""
    root = os.environ.get("VLLM_LING_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm-ling"
    )
    return Path(root) / f"v{CACHE_VERSION}"


def build(source: str, defines: Mapping[str, int | str], arch: str, cache: Path | None) -> Built:
    """The binary of `kernels/<source>` for `arch` (such as "sm_90a"), from the cache if possible.

    Raises:
        CompileError: with the compiler's log.
    """
    key = kernel_key(source, defines, arch)
    path = None if cache is None else cache / f"{Path(source).stem}-{arch}-{key[:20]}.cubin"
    if path is not None and (cubin := read_entry(path, key)) is not None:
        return Built(cubin, "cache")
    cubin = compile_source(source, defines, arch)
    problem = None if path is None else write_entry(path, key, cubin)
    return Built(cubin, "compiled" if problem is None else f"compiled (cache: {problem})")


def compile_source(source: str, defines: Mapping[str, int | str], arch: str) -> bytes:
    """Compiles `kernels/<source>` with NVRTC; needs no GPU and no CUDA headers."""
    from cuda.bindings import nvrtc

    text, headers = (_FOLDER / source).read_bytes(), _headers()
    names = [name.encode() for name in headers]
    program = _ok(
        nvrtc,
        nvrtc.nvrtcCreateProgram(text, source.encode(), len(names), list(headers.values()), names),
    )
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--use_fast_math"]
    options += [f"-D{name}={value}".encode() for name, value in defines.items()]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _ok(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{source} for {arch}: {log.decode(errors='replace').strip()}")
        cubin = b" " * _ok(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        _ok(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernel:
    """One entry point of a binary, loaded on the current device."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._library = _ok(driver, driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        kernel = _ok(driver, driver.cuLibraryGetKernel(self._library, name.encode()))
        self._function = _ok(driver, driver.cuKernelGetFunction(kernel))
        self._shared_bytes = shared_bytes
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _ok(driver, driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        values: tuple[Any, ...],
        types: tuple[Any, ...],
        stream: int,
        pdl: bool,
        cluster: int = 1,
    ) -> None:
        """Launches on `stream` (a CUstream handle); `pdl` lets it start before its producer has finished.

        `cluster` CTAs along x form a cluster.
        """
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        attributes = []
        if pdl:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        if cluster > 1:
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = together.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attributes.append(together)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        _ok(driver, driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


def _ok(module: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{module.__name__}: {status.name}")
    return values[0] if values else None


def _headers() -> dict[str, bytes]:
    """What a kernel may include, by name."""
    return {path.name: path.read_bytes() for path in sorted(_FOLDER.glob("*.cuh"))}


@lru_cache(maxsize=1)
def _compiler() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def kernel_key(source: str, defines: Mapping[str, int | str], arch: str) -> str:
    """Digest of everything that a binary depends on: sources, defines, architecture, compiler."""
    digest = hashlib.sha256()
    for part in (
        (_FOLDER / source).read_bytes(),
        *_headers().values(),
        json.dumps([sorted(defines.items()), arch, _compiler()]).encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def read_entry(path: Path, key: str) -> bytes | None:
    """What `write_entry` kept under `key`; None if it is missing, damaged or another's."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or facts.get("key") != key:
        return None
    return content if facts.get("sha256") == hashlib.sha256(content).hexdigest() else None


def write_entry(path: Path, key: str, content: bytes) -> str | None:
    """Writes one cache entry, whole or not at all; why that failed, or None."""
    head = json.dumps({"key": key, "sha256": hashlib.sha256(content).hexdigest()}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head + b"\n" + content)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
