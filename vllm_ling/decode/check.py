# SPDX-License-Identifier: Apache-2.0
"""Does the fused path compute what vLLM's layers compute on the loaded model? Asked once for each kind of batch.

Each half of each layer (attention, MLP) gets the same stream as vLLM's half, from the same states, and what it adds to
the stream and to the states is compared. A weight, norm, gate or state slot that went to the wrong place shows here:
none of them needs to change a greedy token. The states lie in slots of the check's own, other ones in each group of
layers as in service, and every byte is put back. What enters MLA's attention is compared too (`check_inputs.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from vllm_ling.decode.body import FusedBody, FusedLayer
from vllm_ling.decode.check_inputs import in_one_form, our_inputs, vllm_inputs
from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import KdaLayer, MlaLayer
from vllm_ling.status import info

# Both sides keep BF16 activations here and differ by where they round. Another layer's weight makes 14% and more, even
# a small one (`tests/cpu/fused_on_cpu.py`). One token of a few whose expert is a near tie can make 10% of an MLP, so an
# MLP beyond the bound is tried again on another stream, where the same tie is not to be expected.
BOUND = 0.1
# What rounding the stream itself to BF16 explains, as a share of the stream: about the RMS of an error that is even
# over a unit in the last of 8 bits.
_ROUNDING = 2.0**-9


class NotChecked(Exception):
    """Why the comparison could not be made here, known before anything was computed; says nothing about the path."""


class Inconclusive(NotChecked):
    """It was made and shows nothing."""


@dataclass(frozen=True)
class Region:
    """Rows of a cache [slots, ...] that a half of a layer reads and writes."""

    cache: Tensor
    rows: Tensor

    def read(self) -> Tensor:
        """A copy."""
        return self.cache[self.rows]

    def write(self, values: Tensor) -> None:
        """Puts `values` there."""
        self.cache[self.rows] = values


def disagreements(
    stock: Sequence[Any], body: FusedBody, stream: Tensor, batches: Mapping[str, KdaBatch]
) -> dict[str, float]:
    """How far each half of each layer is from vLLM's, by name: relative RMS of what it adds, stream and states.

    Called while the batch is `redirected`.

    Args:
        stock: vLLM's decoder layers, in the order of the body's.
        stream: BF16 [tokens, hidden], what enters the first layer.
        batches: as for `FusedBody`.

    Raises:
        Inconclusive: a half adds nothing, or vLLM's attention was not called.
    """
    found: dict[str, float] = {}
    generator = torch.Generator(stream.device).manual_seed(1)
    for number, (theirs, ours) in enumerate(zip(stock, body.layers, strict=True)):
        what = f"layer {number} attention"
        stream, found[what] = _attention(theirs, ours, body, stream, batches, generator, what)
        what = f"layer {number} mlp"
        before = stream
        stream, found[what] = _mlp(theirs, ours, body, before, what)
        if BOUND < found[what] < float("inf"):
            other = torch.randn(before.shape, generator=generator, device=before.device, dtype=torch.float32)
            _, again = _mlp(theirs, ours, body, (rms(before.float()) * other).to(before.dtype), what)
            if again <= BOUND:
                info(
                    f"{what}: {found[what]:.2f} from vLLM's on one stream, {again:.4f} on another: a near tie"
                )
                found[what] = again
    return found


def _attention(
    theirs: Any,
    ours: FusedLayer,
    body: FusedBody,
    stream: Tensor,
    batches: Mapping[str, KdaBatch],
    generator: torch.Generator,
    what: str,
) -> tuple[Tensor, float]:
    """The stream after vLLM's half, and how far ours is from it."""
    tokens = stream.shape[0]
    regions = _regions(theirs, ours, batches)
    kept = [region.read() for region in regions]
    try:
        begin = [_random(values, generator) for values in kept]
        positions = _positions(ours, tokens, stream.device)
        _write(regions, begin)
        with vllm_inputs(theirs) as right_inputs:
            right = _stock_attention(theirs, stream, positions)
        right_states = [region.read() for region in regions]
        _write(regions, begin)
        with our_inputs(theirs, ours, tokens) as my_inputs:
            mine = _our_attention(ours, body, stream, positions, batches)
        my_states = [region.read() for region in regions]
    finally:
        _write(regions, kept)
    distance = away(mine, right, stream, what, _ROUNDING)
    for values in zip(my_states, right_states, begin, strict=True):
        distance = worse(distance, away(*values, f"{what}'s state"))
    if isinstance(ours.attention, KdaLayer):
        return right, distance
    return right, worse(distance, _inputs(my_inputs, in_one_form(my_inputs, right_inputs, theirs), what))


def _inputs(mine: Mapping[str, Tensor], right: Mapping[str, Tensor], what: str) -> float:
    """How far what entered our attention is from what entered vLLM's."""
    if not mine or not right:
        raise Inconclusive(f"{what} does not call vLLM's attention once with query, latent and key")
    distance = 0.0
    for name, values in right.items():
        distance = worse(distance, away(mine[name], values, torch.zeros_like(values), f"{what}'s {name}"))
    return distance


def _mlp(theirs: Any, ours: FusedLayer, body: FusedBody, before: Tensor, what: str) -> tuple[Tensor, float]:
    """The stream after vLLM's half, and how far ours is from it."""
    right = before + theirs.mlp(theirs.post_attention_layernorm(before))
    mine = before.clone()
    ours.mlp(mine, body.space)
    return right, away(mine, right, before, what, _ROUNDING)


@contextmanager
def redirected(
    stock: Sequence[Any], layers: Sequence[FusedLayer], batches: Mapping[str, KdaBatch], tokens: int
) -> Iterator[None]:
    """Other state slots for each group of KDA layers, and rows of the null block for what attention writes.

    vLLM's warm-up gives every group slot 0 and lets attention write nowhere: no layer would see its own states.

    Raises:
        NotChecked: the caches are too small, or nothing tells where attention writes.
    """
    with ExitStack() as stack:
        for tensor, values in (*_slots(layers, batches), *_cache_rows(stock, tokens)):
            kept = tensor.clone()
            stack.callback(tensor.copy_, kept)
            tensor.copy_(values)
        yield


def _slots(layers: Sequence[FusedLayer], batches: Mapping[str, KdaBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    groups: dict[int, KdaBatch] = {}
    pool = 0
    for layer in layers:
        if isinstance(layer.attention, KdaLayer):
            batch = batches[layer.attention.name]
            groups.setdefault(batch.slots.data_ptr(), batch)
            pool = layer.attention.states().recurrent.shape[0]
    first = 1  # slot 0 is vLLM's null block
    for batch in groups.values():
        count = batch.slots.numel()
        if first + count > pool:
            raise NotChecked(f"{pool} state slots are too few for {len(groups)} groups of layers")
        values = torch.arange(first, first + count, dtype=batch.slots.dtype, device=batch.slots.device)
        yield batch.slots, values.view(batch.slots.shape)
        first += count


def _cache_rows(stock: Sequence[Any], tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    seen = set()
    for layer in stock:
        attention = getattr(layer.self_attn, "mla_attn", None)
        if attention is None:
            continue
        mappings = get_forward_context().slot_mapping
        mapping = mappings.get(attention.mla_attn.layer_name) if isinstance(mappings, dict) else None
        if mapping is None:
            raise NotChecked("the batch has no slots for MLA's cache")
        if attention.mla_attn.kv_cache.shape[1] < tokens:
            raise NotChecked("a block of MLA's cache is shorter than the batch")
        if mapping.data_ptr() not in seen:
            seen.add(mapping.data_ptr())
            yield mapping[:tokens], torch.arange(tokens, dtype=mapping.dtype, device=mapping.device)


def _regions(stock: Any, ours: FusedLayer, batches: Mapping[str, KdaBatch]) -> list[Region]:
    if isinstance(ours.attention, KdaLayer):
        states, rows = ours.attention.states(), batches[ours.attention.name].slots.reshape(-1).long()
        return [Region(states.conv, rows), Region(states.recurrent, rows)]
    cache = stock.self_attn.mla_attn.mla_attn.kv_cache
    return [Region(cache, torch.zeros(1, dtype=torch.long, device=cache.device))]


def _write(regions: Sequence[Region], values: Sequence[Tensor]) -> None:
    for region, rows in zip(regions, values, strict=True):
        region.write(rows)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like.clone()  # a cache of bytes: random ones may be NaN in what they stand for
    # Latents and convolution inputs are about one in size, entries of the recurrent state a tenth of that.
    scale = 0.1 if like.dtype == torch.float32 else 1.0
    values = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return (scale * values).to(like.dtype)


def _positions(ours: FusedLayer, tokens: int, device: torch.device) -> Tensor:
    positions = 11 + 37 * torch.arange(tokens, device=device)
    if isinstance(ours.attention, MlaLayer):
        positions %= ours.attention.weights.cos_sin.shape[0]
    return positions


def _stock_attention(layer: Any, stream: Tensor, positions: Tensor) -> Tensor:
    normed = layer.input_layernorm(stream)
    if hasattr(layer.self_attn, "f_proj"):
        out = torch.zeros_like(normed)
        layer.self_attn(normed, positions, out)
    else:
        out = layer.self_attn(normed, positions)
    return stream + out


def _our_attention(
    layer: FusedLayer, body: FusedBody, stream: Tensor, positions: Tensor, batches: Mapping[str, KdaBatch]
) -> Tensor:
    mine = stream.clone()
    if isinstance(layer.attention, KdaLayer):
        layer.attention(mine, body.space, batches)
    else:
        layer.attention(mine, body.space, positions)
    return mine


def away(ours: Tensor, right: Tensor, before: Tensor, what: str, rounding: float = 0.0) -> float:
    """RMS of `ours - right` as a share of what was added to `before`, less `rounding` as a share of `right`.

    Raises:
        Inconclusive: neither added anything, so there is nothing to compare.
    """
    ours, right, before = ours.float(), right.float(), before.float()
    added, difference = rms(right - before), rms(ours - right)
    if added == 0 == difference:
        raise Inconclusive(f"{what} adds nothing")
    if added == 0:
        return float("inf")
    # Not max(0, ...): that would make 0 of NaN.
    return (difference if difference != difference else max(difference - rounding * rms(right), 0.0)) / added


def rms(values: Tensor) -> float:
    """Root of the mean square."""
    return float(values.square().mean().sqrt())


def worse(one: float, other: float) -> float:
    """The larger of two distances; NaN is larger than any number."""
    return one if one != one or one >= other else other
