# SPDX-License-Identifier: Apache-2.0
"""The state that vLLM's V2 model runner keeps for a Ling model: vLLM's own for hybrid models, with the cuts of `host`.

A model names this class itself (`get_model_state_cls`), so no other model meets it.
"""

from typing import Any

from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_ling.host.staged_writes import keep_sent


class LingModelState(MambaHybridModelState):
    """vLLM's, doing less where the result is the same."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """vLLM's sampler stays, but sends its tables only when they changed."""
        custom = super().custom_sampler(sampler)
        if custom is None:
            keep_sent(sampler)
        return custom
