# SPDX-License-Identifier: Apache-2.0
"""How far a kernel is from its reference, on a GPU and in the emulator."""

import torch


def rms(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative RMS error."""
    return float(
        (ours.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt()
    )
