# SPDX-License-Identifier: Apache-2.0
"""Random weights of the model's shapes, made on the GPU."""

import torch

from vllm_ling.quant.decode_moe import MoEShape, MoEWeights

FLASH = MoEShape(hidden=2560, intermediate=768, experts=512, top_k=8, groups=8, top_groups=4)


def random_fp8(rows: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [rows, k] and power-of-two scales float32 [rows / 128, k / 128] of a random block-FP8 matrix."""
    codes = (torch.randn(rows, k, device=device, dtype=torch.float32) * 40).to(torch.float8_e4m3fn)
    exponents = torch.randint(-12, -9, (-(-rows // 128), k // 128), device=device)
    return codes, torch.exp2(exponents.float())


def random_moe_layer(
    shape: MoEShape, device: torch.device, scales: tuple[int, int] = (117, 122)
) -> MoEWeights:
    """A layer with all code bytes equally likely and E8M0 scales from `scales` (first and last + 1)."""

    def codes(rows: int, k: int) -> torch.Tensor:
        size = (shape.experts, k // 16, rows // 64, 32, 4)
        return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device)

    def scale(rows: int, k: int) -> torch.Tensor:
        size = (shape.experts, k // 32, rows // 64, 8, 8)
        return torch.randint(*scales, size, dtype=torch.uint8, device=device)

    hidden, inter = shape.hidden, shape.intermediate
    gate = torch.randn(shape.experts, hidden, device=device, dtype=torch.float32) * 0.02
    bias = torch.randn(shape.experts, device=device, dtype=torch.float32) * 0.01
    experts = (codes(2 * inter, hidden), scale(2 * inter, hidden), codes(hidden, inter), scale(hidden, inter))
    shared = (*random_fp8(2 * shape.shared, hidden, device), *random_fp8(hidden, shape.shared, device))
    return MoEWeights(gate.bfloat16() if shape.gate_bf16 else gate, bias, *experts, *shared)
