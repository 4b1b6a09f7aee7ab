# SPDX-License-Identifier: Apache-2.0
"""The MTP draft as vLLM sees it: upstream's layer, without a head of its own, strictly loaded.

vLLM's own proposers (V1 and V2 model runner) drive it and hand it the target's embedding and head; `SharedHead` proves
the hand-over.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe_v3_mtp import BailingMoeV3MTPModel
from vllm.platforms import current_platform

from vllm_ling.models.config_copy import with_ling_quantization
from vllm_ling.models.naming import draft_name
from vllm_ling.models.strict_loading import load_strictly
from vllm_ling.options import parse_options
from vllm_ling.spec_decode.shared_head import SharedHead, unbind


class LingMTPModel(BailingMoeV3MTPModel):
    """Ling's single MTP layer, rolled for as many draft tokens as are asked for."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        vllm_config = with_ling_quantization(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = parse_options(vllm_config.additional_config)
        layers: Any = self.model.layers
        fail = options.on_fault == "fail"
        for layer in layers.values():
            unbind(layer.shared_head.head)
            layer.shared_head = SharedHead(layer.shared_head.head, fail=fail, inject=options.inject_fault)
        if current_platform.is_cuda():
            from vllm_ling.models.moe_block import install_moe_blocks

            install_moe_blocks(self, vllm_config)

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Draft logits [tokens, vocab] of `hidden_states` [tokens, hidden], through the proven head only.

        Upstream prefers `self.lm_head` where a runner has set it; one path leaves nothing unproven.
        """
        return self.model.compute_logits(hidden_states, spec_step_idx)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the MTP layer and the embedding; every tensor of the layer must be consumed and every parameter filled.

        Raises:
            LingError: naming the tensor or parameter.
        """
        return load_strictly(self, weights, draft_name(self.config), what="MTP layer")
