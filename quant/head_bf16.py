# SPDX-License-Identifier: Apache-2.0
"""The BF16 output head: vLLM's own method, which also gives rows to a draft of fewer and tells it of a reload."""

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_ling.spec_decode.shared_head import head_changed


class HeadBf16Method(UnquantizedEmbeddingMethod):
    """A plain head, so the subclass is safe: vLLM may treat its weight as numbers."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        head_changed(layer)

    def for_rows(self) -> "HeadBf16Method":
        """The method of a layer that holds `gather`ed rows."""
        return self

    def gather(self, layer: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of the rows `ids` (int64, on the layer's device), by parameter name."""
        return {"weight": layer.weight.data[ids]}
