# SPDX-License-Identifier: Apache-2.0
"""Runs in the front process when a Ling model's vLLM config is built: refuses early what could only fail late."""

from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig


class LingConfigHook(VerifyAndUpdateConfig):
    """Entry of vLLM's per-architecture config hooks (see `compat.WORKAROUNDS`)."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Validates options, head choice, draft settings and checkpoint files; applies CPU settings.

        Raises:
            LingError: one line naming the option, file or tensor.
        """
        from vllm.platforms import current_platform

        from vllm_ling.checkpoint.locate import resolve_model
        from vllm_ling.checkpoint.validate import validate_checkpoint
        from vllm_ling.options import parse_options
        from vllm_ling.quant.head import head_facts
        from vllm_ling.quant.head_policy import choose_head
        from vllm_ling.spec_decode.draft_argmax import choose_draft_argmax
        from vllm_ling.spec_decode.draft_vocab import load_draft_vocab, tokenizer_hash
        from vllm_ling.spec_decode.gate_setup import set_up
        from vllm_ling.spec_decode.refusals import DraftFacts, refuse
        from vllm_ling.status import share

        share()
        options = parse_options(vllm_config.additional_config)
        # A cached download may be incomplete, and vLLM fetches the rest: only folders are judged before loading.
        folder = Path(vllm_config.model_config.model)
        if folder.is_dir() and vllm_config.load_config.load_format != "dummy":
            validate_checkpoint(folder)
        choose_head(options, head_facts(vllm_config))
        draft, target = vllm_config.speculative_config, vllm_config.model_config
        refuse(
            DraftFacts(
                method=getattr(draft, "method", None),
                quantization=getattr(draft, "quantization", None),
                target_quantization=target.quantization,
                mtp_layers=getattr(target.hf_config, "num_nextn_predict_layers", 0) or 0,
                draft_vocab=options.draft_vocab is not None,
                tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
            )
        )
        if draft is not None and draft.method == "mtp":
            ranks = vllm_config.parallel_config.tensor_parallel_size
            draft.use_local_argmax_reduction, _ = choose_draft_argmax(
                draft, ranks, current_platform.is_cuda(), options.draft_gate != "off"
            )
        if options.draft_vocab is not None:
            known = tokenizer_hash(resolve_model(target.model))
            load_draft_vocab(options.draft_vocab, target.hf_config.vocab_size, known)
        set_up(vllm_config, cpu=current_platform.is_cpu())
        if current_platform.is_cpu():
            from vllm_ling.cpu.install import install_cpu_layers
            from vllm_ling.cpu.settings import apply_cpu_settings

            install_cpu_layers()
            apply_cpu_settings(vllm_config)
