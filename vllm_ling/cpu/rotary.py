# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on the CPU through vLLM's own torch formula.

What: `forward_cpu` = `forward_native`. Why: the C++ op assumes [tokens, heads * dim]; MLA passes [tokens, heads, dim]
and strided views, of which it rotates one head only, without an error. Remove when: the op checks or honours shapes.
"""

from typing import Any

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


class NativeRotaryEmbedding(RotaryEmbedding):
    """Same parameters and cache, torch arithmetic."""

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)
