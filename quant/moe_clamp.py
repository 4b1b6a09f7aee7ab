# SPDX-License-Identifier: Apache-2.0
"""Ling's SwiGLU clamp inside vLLM's GPU expert backends, in the form the model was trained with.

Trained form: silu(gate).clamp(max=L) * up.clamp(-L, L). vLLM's backends clamp the gate before SiLU instead (or use a
fixed limit of 7), which differs as soon as a gate exceeds L. The clamp is put in by subclassing the backend's experts
class at the one point where it applies its activation.
"""

from typing import Any

import torch
from vllm.model_executor.layers.activation import swiglustep_and_mul_triton

from vllm_ling.errors import LingError

# Backends known to call `self.activation` between the two GEMMs, and those that go through `process_input`.
_ACTIVATION_HOOK = ("MarlinExperts", "BatchedMarlinExperts", "TritonExperts", "TritonWNA16Experts")
_INPUT_HOOK = ("HummingIndexedExperts", "HummingGroupedExperts")


def clamp_after_silu(method: Any, limit: float, layer_name: str) -> None:
    """Makes `method` (a fused-MoE method with an `experts_cls`) apply the trained clamp with `limit`.

    Raises:
        LingError: if the backend's activation cannot be reached.
    """
    experts = method.experts_cls
    if experts.__name__ in _INPUT_HOOK:
        method.experts_cls = _clamp_in_process_input(experts, limit)
    elif experts.__name__ in _ACTIVATION_HOOK:
        method.experts_cls = _clamp_in_activation(experts, limit)
    else:
        raise LingError(
            f"{layer_name}: MoE backend {experts.__name__} cannot apply Ling's SwiGLU clamp of {limit:g}; "
            "start with --moe-backend marlin or triton"
        )


def _clamp_in_activation(experts: type, limit: float) -> type:
    def activation(self: Any, activation: Any, output: torch.Tensor, input: torch.Tensor, **_: Any) -> None:
        swiglustep_and_mul_triton(output, input, limit)

    return type(experts.__name__, (experts,), {"activation": activation, "__doc__": experts.__doc__})


def _clamp_in_process_input(experts: Any, limit: float) -> type:
    def process_input(
        self: Any, sublayer_name: str, inputs: torch.Tensor, quanted_input: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("activation") is not None:
            kwargs["activation"] = None
            gated = inputs.new_empty(*inputs.shape[:-1], inputs.shape[-1] // 2)
            swiglustep_and_mul_triton(gated, inputs, limit)
            inputs = gated
        return experts.process_input(self, sublayer_name, inputs, quanted_input, *args, **kwargs)

    return type(experts.__name__, (experts,), {"process_input": process_input, "__doc__": experts.__doc__})
