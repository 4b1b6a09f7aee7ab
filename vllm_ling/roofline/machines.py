# SPDX-License-Identifier: Apache-2.0
"""Memory bandwidths: named machines with their origin, or the GPU at hand measured by a copy."""

from dataclasses import dataclass

from vllm_ling.errors import LingError


@dataclass(frozen=True)
class Machine:
    """A memory system: `bandwidth` in bytes per second, `source` says whether it is a data sheet's or measured."""

    name: str
    bandwidth: float
    source: str
    gpu: str = ""

    def milliseconds(self, traffic: float) -> float:
        """Time for `traffic` bytes at this bandwidth: a lower bound of a step's time, launches not counted."""
        return traffic / self.bandwidth * 1e3


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("gb10", 273e9, "nominal, LPDDR5X of the DGX Spark", "GB10"),
        Machine("gb10-achievable", 235e9, "what good kernels reach in public measurements", "GB10"),
        Machine("rtx-pro-6000", 1792e9, "nominal, GDDR7 of the RTX PRO 6000 Blackwell", "RTX PRO 6000"),
        Machine("h100", 3350e9, "nominal, HBM3 of the H100 SXM", "H100"),
        Machine("h200", 4300e9, "measured, read and write copy", "H200"),
    )
}


def machine(name: str) -> Machine:
    """A named machine.

    Raises:
        LingError: the name is unknown; lists the known ones.
    """
    if name not in MACHINES:
        raise LingError(
            f"--machine {name}: not one of {', '.join(MACHINES)}; --measure takes the GPU at hand"
        )
    return MACHINES[name]


def matching_gpu(gpus: list[str]) -> Machine | None:
    """The named machine with the first of `gpus` (names as the driver gives them), achievable before nominal."""
    if not gpus:
        return None
    found = [known for known in MACHINES.values() if known.gpu and known.gpu in gpus[0]]
    return found[-1] if found else None


def measure(gigabytes: float = 2.0, repeats: int = 20) -> Machine:
    """Bandwidth of the present GPU: median of `repeats` device-to-device copies, bytes read plus bytes written.

    Raises:
        LingError: torch sees no CUDA device, or too little memory is free.
    """
    import torch

    if not torch.cuda.is_available():
        raise LingError("--measure: torch sees no CUDA device; name a machine with --machine instead")
    try:
        source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        raise LingError(f"--measure: needs {2 * gigabytes:.0f} GB of free GPU memory") from None
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        if repeat >= 3:  # the first ones warm clocks and mappings
            times.append(start.elapsed_time(end))
    seconds = sorted(times)[len(times) // 2] / 1e3
    name = torch.cuda.get_device_name()
    return Machine("measured", 2 * source.nbytes / seconds, f"copy of {gigabytes:g} GB on {name}", name)
