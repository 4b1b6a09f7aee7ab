# SPDX-License-Identifier: Apache-2.0
"""What the emulator's tests share."""

from collections.abc import Callable

import torch

from vllm_ling.quant.jit import Gpu

CPU = torch.device("cpu")


def gpu_with(sms: int, shared_kib: int = 227) -> Gpu:
    """A GPU so small that a kernel's CTAs can be emulated all at once."""
    return Gpu("sm_90a", sms, shared_kib * 1024)


def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
    """Random float32."""
    return torch.randn(size, dtype=torch.float32) * scale


def same_bits(run: Callable[[bool], torch.Tensor], times: int = 3) -> torch.Tensor:
    """What `run(early)` returns, each time under another schedule, the first and third with an early start."""
    outs = [run(number % 2 == 0) for number in range(times)]
    bits = [out.view(torch.int16) if out.dtype == torch.bfloat16 else out for out in outs]
    assert all(torch.equal(other, bits[0]) for other in bits), "other schedules, other bits"
    return outs[0]
