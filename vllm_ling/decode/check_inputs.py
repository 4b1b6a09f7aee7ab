# SPDX-License-Identifier: Apache-2.0
"""What enters MLA's attention, on vLLM's side and on ours, for the comparison at load (`check.py`).

In vLLM's warm-up a sequence is no longer than its batch, so one token sees one key, and no query changes what comes
out. vLLM's attention is called with query, latent and rotary key. Ours is launched on what the first projection gives,
so its inputs are what its first kernel leaves: the tokens' rows of the cache, and queries in the latent space.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_ling.decode.body import FusedLayer

_CALLED_WITH = ("query", "latent", "key")


@contextmanager
def vllm_inputs(stock: Any) -> Iterator[dict[str, Tensor]]:
    """Holds afterwards what vLLM's attention was called with, by name: BF16 [tokens, heads, nope + rope] (rotated),
    [tokens, latent] (normed) and [tokens, 1, rope] (rotated). Empty unless there was exactly one call; of a KDA layer
    always.
    """
    seen: dict[str, Tensor] = {}
    calls: list[tuple[Tensor, ...]] = []
    attention = getattr(stock.self_attn, "mla_attn", None)
    if attention is None:
        yield seen
        return

    def keep(module: Any, inputs: tuple[Tensor, ...]) -> None:
        calls.append(tuple(tensor.clone() for tensor in inputs[: len(_CALLED_WITH)]))

    handle = attention.mla_attn.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()
    if len(calls) == 1 and len(calls[0]) == len(_CALLED_WITH):
        seen.update(zip(_CALLED_WITH, calls[0], strict=True))


@contextmanager
def our_inputs(stock: Any, ours: FusedLayer, tokens: int) -> Iterator[dict[str, Tensor]]:
    """As `vllm_inputs`, but where our attention serves the batch "latent query", BF16 [tokens, heads, latent], and
    "rotated query", BF16 [tokens, heads, rope], stand in the place of "query".
    """
    latent: Any = getattr(ours.attention, "latent", None)
    batch = None if latent is None else latent.batch(tokens)
    if batch is None:
        with vllm_inputs(stock) as seen:
            yield seen
        return
    query: Tensor = latent.kernel.query[:tokens]
    query.fill_(torch.nan)  # what another layer left there is no evidence
    seen = {}
    yield seen
    width, size, slots = latent.weights().key.shape[2], batch.cache.shape[1], batch.slots[:tokens]
    rows = batch.cache[slots // size, slots % size]
    seen["latent query"], seen["rotated query"] = query[..., :width].clone(), query[..., width:].clone()
    seen["latent"], seen["key"] = rows[:, :width], rows[:, None, width:]


def in_one_form(mine: Mapping[str, Tensor], right: dict[str, Tensor], stock: Any) -> dict[str, Tensor]:
    """vLLM's inputs `right` in the form of ours: with queries in the latent space (float32) where ours have them."""
    if "latent query" not in mine or not right:
        return right
    into = stock.self_attn.mla_attn.mla_attn.W_UK_T  # [heads, nope, latent]
    plain, rotated = right["query"].split([into.shape[1], right["query"].shape[2] - into.shape[1]], -1)
    queries = {
        "latent query": torch.einsum("thp,hpl->thl", plain.float(), into.float()),
        "rotated query": rotated,
    }
    return queries | {name: right[name] for name in ("latent", "key")}
