# SPDX-License-Identifier: Apache-2.0
"""Model-registry entry for `BailingMoeV3ForCausalLM`: vLLM's model, with Ling's layer methods and strict loading.

The stock class stays the parity oracle and the way back (`VLLM_LING_DISABLE=1`).
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from vllm_ling.cpu.install import install_cpu_layers
from vllm_ling.decode import captured
from vllm_ling.decode.policy import one_gpu
from vllm_ling.models.config_copy import with_ling_quantization
from vllm_ling.models.naming import target_name
from vllm_ling.models.strict_loading import load_strictly
from vllm_ling.options import parse_options
from vllm_ling.quant.head import linear_choice
from vllm_ling.quant.linear_check import report
from vllm_ling.spec_decode.shared_head import register_target_head
from vllm_ling.status import choose, warning

# This module is imported only where a Ling model is served, so other models never see the replaced layers.
install_cpu_layers()


def fused_target(model: Any, vllm_config: VllmConfig, option: str) -> Any:
    """The fused decode path of `model` (built at its first batch), or None."""
    reason = "" if option != "layers" else "ling.decode=layers"
    if not one_gpu(vllm_config.parallel_config):
        reason = "it serves one GPU"
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in model.model.layers]
    kda = [attention.prefix for attention in attentions if hasattr(attention, "f_proj")]
    if not kda:
        reason = "there is no KDA layer whose plan describes a batch"
    if reason:
        if option == "fused":
            warning(f"ling.decode=fused cannot be honoured ({reason}); vLLM's layers decode")
        choose("target decode", "layers", reason)
        return None
    from vllm_ling.decode.fused import FusedPath, build_target

    return FusedPath("target", option, lambda device: build_target(model, device), kda)


class LingForCausalLM(BailingMoeV3ForCausalLM):
    """Target model; its output head announces itself so that a draft can prove it shares it."""

    # Upstream lists this merge for the MTP layer only; without it, exclusions of q_a_proj and kv_a_proj_with_mqa (which
    # Ling-3.0-tiny keeps in BF16) do not reach the merged layer.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **BailingMoeV3ForCausalLM.packed_modules_mapping,
        "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        vllm_config = with_ling_quantization(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        register_target_head(self.lm_head)
        if current_platform.is_cuda():
            from vllm_ling.models.moe_block import install_moe_blocks

            install_moe_blocks(self, vllm_config)
        options = parse_options(vllm_config.additional_config)
        linear, reason = linear_choice(vllm_config)
        if linear == "stock":
            choose("linear decode", linear, reason)
        # Set to a dict, it receives the residual stream after each layer of the fused path (eager execution only).
        self.ling_taps: dict[int, torch.Tensor] | None = None
        self._fused = fused_target(self, vllm_config, options.decode) if current_platform.is_cuda() else None

    @staticmethod
    def get_model_state_cls() -> type:
        """What vLLM's V2 model runner keeps for this model (V1 does not ask)."""
        from vllm_ling.host.model_state import LingModelState

        return LingModelState

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states BF16 [tokens, hidden] after the final norm, through the fused path or vLLM's layers."""
        report()  # target and draft are loaded by the first call
        if self._fused is not None and input_ids is not None and intermediate_tensors is None:
            unusual = "embeddings come from outside" if inputs_embeds is not None else ""
            taken = self._fused.take(input_ids.shape[0], input_ids.device, unusual)
            captured.note("target", input_ids.shape[0], taken and taken[0])
            if taken is not None:
                built, batches = taken
                built.body.taps = self.ling_taps
                residual = self.model.word_embeddings(input_ids)
                return self.model.norm(built.body(residual, positions, batches))
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def best_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """int64 [tokens], what `compute_logits` of `hidden_states` [tokens, hidden] is largest for, the lowest on ties.

        None where only the logits can tell.
        """
        processor, method = self.logits_processor, self.lm_head.quant_method
        plain = processor.scale == 1.0 and processor.soft_cap is None and not processor.logits_as_input
        if not plain or hidden_states.shape[0] > getattr(method, "most_best_rows", 0):
            return None
        return method.best_rows(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads every tensor of the checkpoint but the MTP layer's.

        Raises:
            LingError: naming the tensor or parameter that does not fit, is left over or is missing.
        """
        return load_strictly(self, weights, target_name(self.config), what="model")
