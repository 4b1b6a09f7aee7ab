# SPDX-License-Identifier: Apache-2.0
"""Who multiplies with the block-FP8 projections and the FP8 head. Pure policy: no tensors, no kernels, no logging."""

from typing import Literal

LinearChoice = Literal["ling", "stock"]


def choose_linear(option: str, *, nvidia: bool, one_gpu: bool) -> tuple[LinearChoice, str]:
    """Returns (choice, reason) for `ling.linear=option`; each layer may still fall back where its shape does not fit.

    Args:
        nvidia: whether vLLM runs on an NVIDIA GPU.
        one_gpu: see `decode.policy.one_gpu`; shards have not been measured, so only an explicit option takes them.
    """
    if not nvidia:
        return "stock", f"ling.linear={option}: the kernel needs an NVIDIA GPU"
    if option == "auto" and not one_gpu:
        return "stock", "ling.linear=auto: measured on one GPU only; ling.linear=ling takes shards too"
    if option == "stock":
        return "stock", "ling.linear=stock"
    return "ling", f"ling.linear={option}: our kernel for few tokens, vLLM's GEMM above"
