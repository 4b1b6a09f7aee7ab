# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model state and GDN plan builders on the CPU: what a whole-step graph would read, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

REQUESTS, BLOCKS = 4, 6
GROUPS = 3  # MLA, then two groups of KDA layers
CPU = torch.device("cpu")


@dataclass
class MlaPlan:
    """The fields that our attention reads."""

    decode: Any
    query_start_loc: torch.Tensor
    num_prefills: int
    schedule: torch.Tensor | None = None


class MlaBuilder:
    """In place of FlashAttention's."""

    supports_update_block_table = False
    copies = False

    def build(self, _: int, common: Any, **__: Any) -> MlaPlan:
        lengths = common.seq_lens.clone() if self.copies else common.seq_lens
        decode = SimpleNamespace(block_table=common.block_table_tensor, seq_lens=lengths)
        return MlaPlan(decode, common.query_start_loc, 0)

    def build_for_cudagraph_capture(self, common: Any) -> MlaPlan:
        return self.build(0, common)


def gdn_builder(drafts: int, cls: type = GDNAttentionMetadataBuilder) -> Any:
    """A real one, without its constructor, which looks for kernels."""
    builder = cls.__new__(cls)
    builder.use_spec_decode, builder.num_spec = drafts > 0, drafts
    builder.use_full_cuda_graph, builder.supports_update_block_table = True, True
    builder.decode_cudagraph_max_bs = most = REQUESTS * (drafts + 1)
    builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    builder.kv_cache_spec = None
    for name, shape, dtype in (
        ("spec_state_indices_tensor", (most, drafts + 1), torch.int32),
        ("non_spec_state_indices_tensor", (most,), torch.int32),
        ("spec_sequence_masks", (most,), torch.bool),
        ("spec_token_indx", (most * (drafts + 1),), torch.int32),
        ("non_spec_token_indx", (most * (drafts + 1),), torch.int32),
        ("spec_query_start_loc", (most + 1,), torch.int32),
        ("non_spec_query_start_loc", (most + 1,), torch.int32),
        ("num_accepted_tokens", (most,), torch.int32),
    ):
        setattr(builder, name, torch.zeros(shape, dtype=dtype))
    return builder


class Bench:
    """One model state with its builders and the runner's buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cls: type, drafts: int) -> None:
        parallel = SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, num_ubatches=1
        )
        config = SimpleNamespace(
            cache_config=SimpleNamespace(mamba_cache_mode="none", use_kda_recoverssm=False),
            num_speculative_tokens=drafts,
            parallel_config=parallel,
            kv_transfer_config=None,
        )

        def init(state: Any, *_: Any) -> None:
            state.vllm_config, state.device, state.max_num_reqs = config, CPU, REQUESTS
            state.model_config = SimpleNamespace(max_model_len=4096)
            state.rope_state = state.prompt_embeds_state = None

        monkeypatch.setattr(DefaultModelState, "__init__", init)
        self.drafts = drafts
        self.state = cls(config, None, None, CPU)
        spec = MambaSpec(block_size=4096, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="none")
        mla: Any = SimpleNamespace(is_mla=True)
        self.groups = [
            [AttentionGroup(None, [f"layer{n}"], mla if n == 0 else spec, n)]  # type: ignore[arg-type]
            for n in range(GROUPS)
        ]
        for n, (group,) in enumerate(self.groups):
            group.metadata_builders = [MlaBuilder() if n == 0 else gdn_builder(drafts)]
        self.kv: Any = SimpleNamespace(kv_cache_groups=self.groups)
        blocks = SimpleNamespace(np=np.zeros((GROUPS, REQUESTS), dtype=np.int32))
        self.tables = SimpleNamespace(num_blocks=blocks)
        self.rows = [torch.zeros(REQUESTS, BLOCKS, dtype=torch.int32) for _ in range(GROUPS)]
        self.gathered = [torch.zeros(REQUESTS, BLOCKS, dtype=torch.int32) for _ in range(GROUPS)]
        self.slots = torch.zeros(GROUPS, 64, dtype=torch.int64)
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.state.initialize_kv_cache(self.kv, self.tables)
        self.next_block = 1

    def add(self, slot: int) -> None:
        """A request arrives with its first blocks."""
        self.state.add_request(slot, SimpleNamespace(num_computed_tokens=0))
        self.tables.num_blocks.np[:, slot] = 0
        for group in range(GROUPS):
            self.append(slot, group, 1 if group == 0 else 1 + self.drafts)

    def append(self, slot: int, group: int, count: int = 1) -> None:
        """A request gets more blocks."""
        have = self.tables.num_blocks.np[group, slot]
        for n in range(count):
            self.rows[group][slot, have + n] = self.next_block
            self.next_block += 1
        self.tables.num_blocks.np[group, slot] = have + count

    def step(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        drafts: Sequence[int] | None,
        lengths: Sequence[int],
        mode: Any = CUDAGraphMode.FULL,
        padded: int | None = None,
        capture: bool = False,
    ) -> Any:
        """The plans of one step, as the runner asks for them."""
        count, padded = len(slots), padded or len(slots)
        index = np.array(slots, dtype=np.intp)
        for n in range(GROUPS):
            self.gathered[n].zero_()
            if not capture:  # which runs on the null block
                self.gathered[n][:count] = self.rows[n][index]
        starts = np.full(padded + 1, sum(tokens), dtype=np.int32)
        starts[: count + 1] = np.cumsum([0, *tokens])
        self.starts[: padded + 1] = torch.from_numpy(starts)
        self.lengths.zero_()
        self.lengths[:count] = torch.tensor(lengths, dtype=torch.int32)
        batch: Any = SimpleNamespace(
            num_reqs=count,
            num_reqs_after_padding=padded,
            num_tokens=sum(tokens),
            num_tokens_after_padding=padded * max(tokens),
            idx_mapping=torch.from_numpy(index.astype(np.int64)),
            idx_mapping_np=index,
            num_scheduled_tokens=np.array(tokens, dtype=np.int32),
            num_draft_tokens_per_req=None if drafts is None else np.array(drafts, dtype=np.int32),
            query_start_loc=self.starts[: padded + 1],
            query_start_loc_np=starts,
            seq_lens=self.lengths[:padded],
            seq_lens_cpu_upper_bound=self.lengths[:padded].clone(),
            is_prefilling_np=np.zeros(count, dtype=bool),
            has_prefill=False,
            prefill_runs_as_decode_np=None,
            max_query_len=None,
            dcp_local_seq_lens=None,
            positions=None,
            prompt_lens=None,
        )
        tables = tuple(table[:padded] for table in self.gathered)
        slot_mappings = self.slots[:, : batch.num_tokens_after_padding]
        return self.state.prepare_attn(
            batch, mode, tables, slot_mappings, self.groups, self.kv, for_capture=capture
        )

    def read_by_graphs(self) -> dict[str, torch.Tensor]:
        """Copies of every buffer of the KDA builders."""
        return {
            f"{n}.{name}": value.clone()
            for n, (group,) in enumerate(self.groups)
            for name, value in vars(group.metadata_builders[0]).items()
            if isinstance(value, torch.Tensor)
        }

    def accept(self, slot: int, number: int) -> None:
        """What the runner notes after a step."""
        self.state.num_accepted_tokens_gpu[slot] = number


def stock() -> type:
    """vLLM's own state."""
    return MambaHybridModelState
