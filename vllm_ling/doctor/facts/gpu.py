# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine's GPUs, from the driver's library through ctypes: no torch, no CUDA context."""

import ctypes
from ctypes import byref, c_char, c_int, c_uint, c_ulonglong, c_void_p
from pathlib import Path

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.text import clean

# Boards whose GPU shares the system's memory: what vLLM takes, the system has no longer.
UNIFIED = ("GB10", "Thor", "Orin")


class _Memory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def read_gpus(facts: Facts) -> None:
    """States `gpu.names`, `gpu.capability`, `gpu.unified` and, where the driver or the system tells, its memory."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        facts.put("gpu.names", [], "no NVIDIA driver library on this machine")
        return
    if nvml.nvmlInit_v2() != 0:
        facts.lacks("gpu.", "the NVIDIA driver does not answer")
        return
    try:
        _probe(facts, nvml)
    finally:
        nvml.nvmlShutdown()


def _probe(facts: Facts, nvml: ctypes.CDLL) -> None:
    count = c_uint()
    if nvml.nvmlDeviceGetCount_v2(byref(count)) != 0:
        facts.lacks("gpu.", "the NVIDIA driver does not count its devices")
        return
    names = []
    for index in range(count.value):
        handle, name = c_void_p(), (c_char * 96)()
        if nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)) != 0:
            continue
        if nvml.nvmlDeviceGetName(handle, name, c_uint(96)) == 0:
            names.append(clean(name.value.decode(errors="replace"), 80))
        major, minor, memory = c_int(), c_int(), _Memory()
        if nvml.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor)) == 0:
            facts.put("gpu.capability", 10 * major.value + minor.value, "NVIDIA driver, first GPU")
        if nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0:
            facts.put("gpu.memory_bytes", memory.total, "NVIDIA driver, first GPU")
    facts.put("gpu.names", names, "NVIDIA driver")
    unified = any(board in name for name in names for board in UNIFIED)
    facts.put("gpu.unified", unified, "NVIDIA driver")
    if unified:  # the driver counts no memory of its own there
        system_memory(facts, Path("/proc/meminfo"))


def system_memory(facts: Facts, path: Path) -> None:
    """States `gpu.memory_bytes` and `gpu.available_bytes` of a GPU that shares the system's memory."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        kilobytes = {word[0].rstrip(":"): int(word[1]) for word in words if len(word) > 1}
        facts.put("gpu.memory_bytes", kilobytes["MemTotal"] * 1024, str(path))
        facts.put("gpu.available_bytes", kilobytes["MemAvailable"] * 1024, str(path))
    except (OSError, ValueError, KeyError) as error:
        facts.lacks("gpu.memory_bytes", f"{path}: {error}")
