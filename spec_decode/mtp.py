# SPDX-License-Identifier: Apache-2.0
"""The MTP draft as vLLM sees it: upstream's layer, without a head of its own, strictly loaded.

vLLM's own proposers (V1 and V2 model runner) drive it and hand it the target's embedding and head; `SharedHead` proves
the hand-over, and `DraftRows` reads part of the proven head where a draft vocabulary is given.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe_v3_mtp import BailingMoeV3MTPModel
from vllm.platforms import current_platform

from vllm_ling.decode import captured
from vllm_ling.decode.policy import one_gpu
from vllm_ling.models.config_copy import with_ling_quantization
from vllm_ling.models.naming import draft_name
from vllm_ling.models.strict_loading import load_strictly
from vllm_ling.options import parse_options
from vllm_ling.spec_decode.confidence import DraftConfidence
from vllm_ling.spec_decode.draft_rows import DraftRows
from vllm_ling.spec_decode.draft_vocab import load_draft_vocab
from vllm_ling.spec_decode.shared_head import SharedHead, unbind
from vllm_ling.status import choose, warning


def fused_draft(layers: Any, vllm_config: VllmConfig, option: str) -> Any:
    """The fused path of the MTP layer (built at its first batch), or None."""
    if option == "layers" or not one_gpu(vllm_config.parallel_config) or len(layers) != 1:
        reason = "ling.decode=layers" if option == "layers" else "not one layer on one GPU"
        if option == "fused":
            warning(f"ling.decode=fused cannot be honoured ({reason}); vLLM's layers decode")
        choose("draft decode", "layers", reason)
        return None
    from vllm_ling.decode.fused import FusedPath, build_draft

    layer = next(iter(layers.values()))
    return FusedPath("draft", option, lambda device: build_draft(layer, device))


def draft_step(
    layer: Any, built: Any, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Hidden states BF16 [tokens, hidden] of the MTP layer, of the embedding and the previous hidden states."""
    residual = built.entry(embeds.contiguous(), hidden.contiguous(), torch.empty_like(embeds))
    return layer.final_layernorm(built.body(residual, positions, {}))


class LingMTPModel(BailingMoeV3MTPModel):
    """Ling's single MTP layer, rolled for as many draft tokens as are asked for."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        vllm_config = with_ling_quantization(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = parse_options(vllm_config.additional_config)
        layers: Any = self.model.layers
        fail = options.on_fault == "fail"
        ids: list[int] = []
        if options.draft_vocab is not None:
            ids = load_draft_vocab(options.draft_vocab, self.config.vocab_size).ids
        for layer in layers.values():
            rows = DraftRows(ids, Path(options.draft_vocab).name) if options.draft_vocab is not None else None
            head = layer.shared_head.head
            unbind(head)
            layer.shared_head = SharedHead(head, fail=fail, inject=options.inject_fault, rows=rows)
        # For the draft gate, which reads it after every round.
        self.confidence: DraftConfidence | None = None
        if options.draft_gate != "off":
            k = vllm_config.speculative_config.num_speculative_tokens
            device = vllm_config.device_config.device
            self.confidence = DraftConfidence(vllm_config.scheduler_config.max_num_seqs, k, device)
        if current_platform.is_cuda():
            from vllm_ling.models.moe_block import install_moe_blocks
            from vllm_ling.spec_decode.draft_graph import join_draft_steps

            install_moe_blocks(self, vllm_config)
            join_draft_steps()
            argmax = bool(vllm_config.speculative_config.use_local_argmax_reduction)
            reason = (
                "greedy drafts on one GPU need no logits" if argmax else "the draft's logits are asked for"
            )
            choose("draft tokens", "argmax" if argmax else "logits", reason)
        self._fused = fused_draft(layers, vllm_config, options.decode) if current_platform.is_cuda() else None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """As vLLM calls it: the fused path for a few tokens, else upstream's (compiled) forward."""
        ids, hidden = inputs.get("input_ids"), inputs.get("hidden_states")
        taken = None
        if self._fused is not None and not args and ids is not None and hidden is not None:
            taken = self._fused.take(ids.shape[0], ids.device, "")
        if ids is not None:
            captured.note("draft", ids.shape[0], taken and taken[0])
        if taken is not None and hidden is not None:
            embeds = inputs.get("inputs_embeds")
            embeds = self.model.embed_tokens(ids) if embeds is None else embeds
            layer: Any = next(iter(self.model.layers.values()))
            return draft_step(layer, taken[0], embeds, hidden, inputs["positions"])
        return super().__call__(*args, **inputs)

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Draft logits [tokens, vocab] of `hidden_states` [tokens, hidden], through the proven head or rows of it only.

        Upstream prefers `self.lm_head` where a runner has set it; one path leaves nothing unproven.
        """
        rows = self._shared_head(spec_step_idx).rows
        if rows is not None and rows.active:
            logits = rows.logits(self.model.logits_processor, hidden_states)
        else:
            logits = self.model.compute_logits(hidden_states, spec_step_idx)
        if self.confidence is not None and logits is not None:
            self.confidence.note(logits)
        return logits

    def get_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Best draft token ids [tokens]; what both runners ask for with `use_local_argmax_reduction`."""
        shared = self._shared_head(spec_step_idx)
        processor: Any = self.model.logits_processor
        if shared.rows is not None and shared.rows.active:
            return shared.rows.top_tokens(processor, hidden_states)
        if processor.scale == 1.0 and processor.soft_cap is None:
            best = getattr(shared.head.quant_method, "best_rows", lambda *_: None)(shared.head, hidden_states)
            if best is not None:
                return best
        return processor.get_top_tokens(shared.head, hidden_states)

    def _shared_head(self, step: int) -> SharedHead:
        layers: Any = list(self.model.layers.values())
        return layers[step % len(layers)].shared_head

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the MTP layer and the embedding; every tensor of the layer must be consumed and every parameter filled.

        Raises:
            LingError: naming the tensor or parameter.
        """
        return load_strictly(self, weights, draft_name(self.config), what="MTP layer")
