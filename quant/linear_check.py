# SPDX-License-Identifier: Apache-2.0
"""Do our FP8 products give what vLLM's give? Asked of every projection, and of the head, once its weights are settled.

The comparison of the fused path (`decode/check.py`) does not ask: with a few tokens vLLM's layers multiply by our
kernels too. Outputs are compared by 128 rows, where one wrong scale of one block still shows.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vllm_ling.status import fault, proof

# vLLM's GEMM rounds the activations to E4M3: 2.6%. A block's scale that is wrong by a factor of two makes
# 1 / sqrt(k / 128), 14% for the widest matrix of flash (k = 6144).
BOUND = 0.1
# To an fp32 product of the same weights: outputs are rounded to BF16 (0.17%), which leaves room for other sums.
EXACT_BOUND = 0.02
_ROWS = 128

# By layer: its name and how far it is. Weak: layers that were built to be timed count no longer.
_COMPARED: "weakref.WeakKeyDictionary[Any, tuple[str, float]]" = weakref.WeakKeyDictionary()
_unreported: set[str] = set()


def random_tokens(tokens: int, width: int, device: torch.device) -> Tensor:
    """BF16 [tokens, width], normal, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(tokens, width, generator=generator, device=device, dtype=torch.float32)
    return values.to(torch.bfloat16)


def furthest(ours: Tensor, right: Tensor) -> Tensor:
    """The largest relative RMS of `ours - right` [tokens, rows] over 128 rows, on the device; NaN if any is NaN.

    Rows of zeros in both (padding) are no difference; zeros in `right` alone are an infinite one.
    """
    difference, size = (_squares(values) for values in (ours.float() - right.float(), right.float()))
    return torch.where((difference == 0) & (size == 0), 0.0, (difference / size).sqrt()).max()


def _squares(values: Tensor) -> Tensor:
    missing = -values.shape[1] % _ROWS
    return torch.nn.functional.pad(values.square(), (0, missing)).unflatten(1, (-1, _ROWS)).sum((0, 2))


def distance(product: Callable[[Tensor], Tensor], counts: Iterable[int], x: Tensor, right: Tensor) -> float:
    """How far `product` is from `right` = x W^T [tokens, rows], at the worst of the token counts.

    Raises:
        ValueError: `right` is zero, so anything like it is no evidence.
    """
    # Also makes the host wait: our kernels read weights before what was launched earlier has ended.
    if not bool(right.any()):
        raise ValueError("vLLM's product of random tokens is zero, so there is nothing to compare")
    return float(torch.stack([furthest(product(x[:count]), right[:count]) for count in counts]).max())


def note(layer: Any, name: str, away: float) -> None:
    """Keeps what came of comparing `layer`; a disagreement is a fault at once, agreement is told by `report`."""
    _COMPARED[layer] = (name, away)
    _unreported.add(name)
    if not away <= BOUND:
        wrong = [f"{name} {away:.3f}" for name, away in _COMPARED.values() if not away <= BOUND]
        fault(
            "linear_decode",
            f"{len(wrong)} of {len(_COMPARED)} projections disagree with vLLM's GEMM (relative RMS of 128 rows): "
            f"{', '.join(wrong[:3])}",
        )


def report() -> None:
    """Records how many projections agree with vLLM's GEMM, if any were compared since the last call and all agree."""
    if not _unreported:
        return
    _unreported.clear()
    found = list(_COMPARED.values())
    if not found or not all(away <= BOUND for _, away in found):
        return
    name, away = max(found, key=lambda one: one[1])
    proof(
        "linear_decode",
        f"{len(found)} projections agree with vLLM's GEMM on random tokens; the furthest is {name}, {away:.4f} "
        "(relative RMS of 128 rows)",
    )
