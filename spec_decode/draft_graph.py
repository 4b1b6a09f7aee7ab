# SPDX-License-Identifier: Apache-2.0
"""All draft steps of a round in one CUDA graph on vLLM's V2 runner (see `compat.WORKAROUNDS`).

The runner records its draft loop in one graph where each attention backend can bring its plan up to date on the GPU.
FlashAttention's MLA backend does not say so, and its plan is then rebuilt by the CPU between any two draft steps.
"""

from typing import Any

from vllm_ling.compat import ARCHITECTURE
from vllm_ling.status import choose

_WHAT = "draft steps"


def join_draft_steps() -> None:
    """Lets the plans of FlashAttention's MLA be updated in place, for Ling models; other models see no change."""
    try:
        from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAMetadataBuilder as Builder
    except ImportError as error:  # a build of vLLM without FlashAttention has other backends
        choose(_WHAT, "vLLM's", f"FlashAttention's MLA backend is not there: {error}")
        return
    if Builder.update_draft_decode_metadata is update:
        return
    if Builder.supports_draft_decode_metadata_update:
        choose(_WHAT, "one graph", "vLLM updates FlashAttention's MLA plan on the GPU between them")
        return
    original = Builder.__init__

    def init(self: Any, kv_cache_spec: Any, layer_names: Any, config: Any, device: Any) -> None:
        original(self, kv_cache_spec, layer_names, config, device)
        self.supports_draft_decode_metadata_update = serves_ling(config) and self.dcp_world_size == 1

    Builder.__init__ = init  # type: ignore[method-assign]
    Builder.update_draft_decode_metadata = update  # type: ignore[method-assign,assignment]
    choose(_WHAT, "one graph", "FlashAttention's MLA plan is updated on the GPU between them (V2 runner)")


def serves_ling(vllm_config: Any) -> bool:
    """Whether the target model is a Ling."""
    return ARCHITECTURE in (getattr(vllm_config.model_config, "architectures", None) or ())


def update(builder: Any, metadata: Any) -> None:
    """Recomputes the schedule of a decode whose lengths have grown, into the tensor that `metadata` holds.

    Everything else of the plan is a view of buffers that the runner updates itself. Runs while a graph is captured.
    """
    plan = metadata.decode
    if plan is None or plan.scheduler_metadata is None:
        return
    fresh = builder._schedule_decode(
        num_reqs=plan.seq_lens.shape[0],
        cu_query_lens=plan.query_start_loc,
        max_query_len=plan.max_query_len,
        seqlens=plan.seq_lens,
        max_seq_len=plan.max_seq_len,
        causal=True,
        max_num_splits=plan.max_num_splits,
    )
    plan.scheduler_metadata[: fresh.shape[0]].copy_(fresh)
