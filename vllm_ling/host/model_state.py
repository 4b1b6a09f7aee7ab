# SPDX-License-Identifier: Apache-2.0
"""The state that vLLM's V2 model runner keeps for a Ling model: vLLM's own for hybrid models, with the cuts of `host`.

A model names this class itself (`get_model_state_cls`), so no other model meets it.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_ling.decode import captured
from vllm_ling.decode.policy import one_gpu
from vllm_ling.host import greedy
from vllm_ling.host.kept_plans import LazyPlans, accepted, key_of
from vllm_ling.host.plans_check import PlansCheck
from vllm_ling.host.staged_writes import keep_sent
from vllm_ling.status import choose

_PLANS = "attention plans"


class LingModelState(MambaHybridModelState):
    """vLLM's, doing less where the result is the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tables: Any = None
        self._last: tuple[Any, ...] | None = None  # what the plans in vLLM's buffers were built for
        self._accepted: list[torch.Tensor] = []
        self._check = PlansCheck()
        self._refused = self._plans_problem()
        self._said: set[str] = set()
        if self._refused:
            choose(_PLANS, "every step", self._refused)

    def _plans_problem(self) -> str:
        config = self.vllm_config
        if not one_gpu(config.parallel_config):
            return "it serves one GPU"
        if config.kv_transfer_config is not None:
            return "a KV connector reads them"
        if self.recoverssm is not None:
            return "RecoverSSM records them"
        return ""

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """vLLM's sampler stays, but sends its tables only when they changed and is not asked about greedy batches."""
        custom = super().custom_sampler(sampler)
        if custom is None:
            keep_sent(sampler)
            greedy.install(self.model, sampler)
        return custom

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """As vLLM's; there are new block tables."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._tables, self._last = block_tables, None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """As vLLM's; a slot has another request."""
        super().add_request(req_index, new_req_data)
        self._last = None

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **others: Any,
    ) -> dict[str, Any]:
        """vLLM's plans by layer; not built anew for the graph of a step that asks the same as the last one."""
        stock = super().prepare_attn

        def build() -> dict[str, Any]:
            return stock(
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                attn_groups,
                kv_cache_config,
                for_capture=for_capture,
                **others,
            )

        size = input_batch.num_tokens_after_padding, input_batch.num_reqs_after_padding
        if for_capture:
            captured.preparing(*size)
        key = None
        if cudagraph_mode == CUDAGraphMode.FULL and not for_capture and not self._refused:
            key = self._key(input_batch, size, attn_groups, kv_cache_config)
        if key is not None and key == self._last:
            for numbers in self._accepted:
                torch.index_select(self.num_accepted_tokens_gpu, 0, input_batch.idx_mapping, out=numbers)
            return self._compared(build, attn_groups) if self._check.due() else LazyPlans(build)
        self._last = None  # whatever this step is, it writes into the same buffers
        plans = build()
        if key is not None:
            groups = [group for some in attn_groups for group in some]
            self._accepted, reason = accepted(plans, input_batch, block_tables, groups)
            if any(_derived(builder) for group in groups for builder in group.metadata_builders):
                reason = "a KDA plan builder is not vLLM's own and may stage more"
            self._last = None if reason else key
            self._say("every step" if reason else "new batches", reason or "a graph reads what is there")
        return plans

    def _compared(self, build: Callable[[], dict[str, Any]], attn_groups: Any) -> Any:
        """vLLM's plans of a step that would have kept them; none is kept any more if they differ."""
        builders = [b for some in attn_groups for group in some for b in group.metadata_builders]
        plans, wrong = self._check.compare(builders, build)
        if wrong:
            self._refused, self._last = wrong, None
            self._say("every step", wrong)
        return plans

    def _key(self, batch: Any, size: captured.Size, attn_groups: Any, kv_cache_config: Any) -> Any:
        """What the plans depend on, or None where vLLM has to build them."""
        if self._tables is None:
            return None
        if reason := captured.problem(size):
            self._say("every step", reason)
            return None
        block = 0
        if self._align_mode:
            block = self._get_mamba_group_info(kv_cache_config)[1].block_size
        slack = 4 * (self.vllm_config.num_speculative_tokens + 1)
        key = key_of(batch, self._tables.num_blocks.np, block, slack)
        return (id(attn_groups), *key) if key is not None else None

    def _say(self, choice: str, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            choose(f"{_PLANS}: {reason}", choice, "decode steps with whole-step CUDA graphs")


def _derived(builder: Any) -> bool:
    return (
        isinstance(builder, GDNAttentionMetadataBuilder) and type(builder) is not GDNAttentionMetadataBuilder
    )
