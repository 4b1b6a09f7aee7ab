# SPDX-License-Identifier: Apache-2.0
"""The MoE block on a GPU: few tokens through one launch of our kernel, more through vLLM's layers, one copy of weights.

The kernel reads what Humming reads (its repacked experts) and the shared expert as stored. Before its first use it is
compared with vLLM's own path on the loaded weights.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3MoE
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ling.quant.decode_moe import MoEDecoder, MoEShape, MoEWeights
from vllm_ling.quant.jit import default_cache, gpu_of
from vllm_ling.quant.moe_decode import CHECK_BOUND, check_block, decode_shape, decode_weights
from vllm_ling.status import choose, fault, proof, warning

_DECODERS: dict[tuple[Any, int], MoEDecoder] = {}


class LingMoE(BailingMoeV3MoE):
    """vLLM's block; `forward` goes through an operator that torch.compile does not look into."""

    ling_name: str
    ling_groups: tuple[int, int]
    ling_group: "MoEGroup"
    ling_weights: MoEWeights
    ling_source: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Routed plus shared experts of BF16 [tokens, hidden]."""
        return torch.ops.vllm.ling_moe_block(hidden_states, self.ling_name)

    def take_weights(self, shape: MoEShape) -> str | None:
        """Looks up the loaded tensors; why they do not fit the kernel, or None."""
        weights, reason = decode_weights(self, shape)
        if weights is None:
            return reason
        self.ling_weights, self.ling_source = weights, self.experts.routed_experts.w13_weight
        return None

    def stock(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The same through vLLM's layers."""
        return BailingMoeV3MoE.forward(self, hidden_states)

    def current_weights(self) -> MoEWeights:
        """The tensors that the kernel reads."""
        decoder = self.ling_group.decoder
        if decoder is not None and self.experts.routed_experts.w13_weight is not self.ling_source:
            self.take_weights(decoder.shape)  # a reload has put new tensors in place
        return self.ling_weights

    def decode(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The same through our kernel; at most `max_tokens` tokens."""
        decoder = self.ling_group.decoder
        assert decoder is not None
        x = hidden_states.contiguous()
        return decoder(
            x,
            self.current_weights(),
            torch.empty_like(x),
            self.routed_scaling_factor,
            self.expert_swiglu_limit or 0.0,
            self.share_expert_swiglu_limit or 0.0,
        )


class MoEGroup:
    """All MoE blocks of one model, which share the decision and the compiled kernels."""

    def __init__(self) -> None:
        self.blocks: list[LingMoE] = []
        self.decoder: MoEDecoder | None = None
        self.decided = False

    def usable(self, x: torch.Tensor) -> bool:
        """Whether our kernel takes these tokens; the first call outside a graph capture decides."""
        if not self.decided and not torch.cuda.is_current_stream_capturing():
            self.decided = True
            self._decide(x.device)
        return (
            self.decoder is not None and x.shape[0] <= self.decoder.max_tokens and x.dtype == torch.bfloat16
        )

    def _decide(self, device: torch.device) -> None:
        try:
            verdict, reason = self._judge(device)
        except Exception as error:  # a kernel that cannot be built or run must not stop the server
            verdict, reason = "stock", f"{type(error).__name__}: {error}"
        if verdict == "stock":
            self.decoder = None
            warning(f"ling.moe=ling cannot be honoured ({reason}); vLLM's backend decodes too")
        choose("moe decode", verdict, reason)

    def _judge(self, device: torch.device) -> tuple[str, str]:
        shape, reason = decode_shape(self.blocks[0])
        if shape is None:
            return "stock", reason
        for block in self.blocks:
            problem = block.take_weights(shape)
            if problem is not None:
                return "stock", f"{block.ling_name}: {problem}"
        key = (shape, device.index or 0)
        if key not in _DECODERS:
            _DECODERS[key] = MoEDecoder(shape, gpu_of(device), device, default_cache())
        self.decoder = _DECODERS[key]
        worst = 0.0
        for block in self.blocks:
            away = check_block(block, device)
            if not away <= CHECK_BOUND:
                fault("moe_decode", f"{block.ling_name}: {away:.3f} (relative RMS) away from vLLM's path")
                return "stock", "our kernel disagrees with vLLM's path on the loaded weights"
            worst = max(worst, away)
        proof("moe_decode", f"relative RMS to vLLM's path at most {worst:.4f} over {len(self.blocks)} layers")
        return "ling", f"ling.moe=ling: up to {self.decoder.max_tokens} tokens in one launch"


def install_moe_blocks(model: Any, vllm_config: VllmConfig) -> None:
    """Gives the MoE blocks of `model` our forward where their experts are marked for it (see `quant.moe`)."""
    blocks = [
        block
        for block in model.modules()
        if type(block) is BailingMoeV3MoE and getattr(block.experts.routed_experts, "ling_decode", False)
    ]
    if not blocks:
        return
    context = vllm_config.compilation_config.static_forward_context
    group = MoEGroup()
    for block in blocks:
        block.__class__ = LingMoE
        block.ling_name = f"{block.experts.layer_name}.ling"
        block.ling_groups = (model.config.n_group, model.config.topk_group)
        block.ling_group = group
        context[block.ling_name] = block
        group.blocks.append(block)


def _moe_block(hidden_states: torch.Tensor, name: str) -> torch.Tensor:
    block = get_forward_context().no_compile_layers[name]
    return (
        block.decode(hidden_states) if block.ling_group.usable(hidden_states) else block.stock(hidden_states)
    )


def _moe_block_fake(hidden_states: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(hidden_states)


direct_register_custom_op("ling_moe_block", _moe_block, fake_impl=_moe_block_fake)
