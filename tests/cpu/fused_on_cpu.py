# SPDX-License-Identifier: Apache-2.0
"""Puts the fused path into a CPU engine: every kernel is its fp32 counterpart, everything around it is the product's.

Run as `python fused_on_cpu.py OUT HOW`: the full-size study's engine on the small model, `HOW` being "fused", "layers"
(vLLM's), or "one group" (every KDA layer with the state slots of the first). What the check at load finds is saved
under "checks": on the path as it is, and with each of `FAULTS` planted where a token sees one key; "planted" names
their places.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers import utils

from vllm_ling.decode import check, from_vllm, fused, mla_from_vllm
from vllm_ling.decode.body import FusedBody, FusedLayer
from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import MoELayer, Projection
from vllm_ling.decode.policy import BatchFacts
from vllm_ling.decode.reference import (
    kda_step_reference,
    latent_query_reference,
    mla_attention_reference,
    mla_prepare_reference,
    rms_norm,
)
from vllm_ling.eval.studies import full_size_side as side


class Layers:
    """Stands in for `Fp8Gemv`: vLLM's own linear layers, after the prologue."""

    max_tokens = 8

    def __init__(self, layers: Any, prologue: str) -> None:
        self._layers, self._prologue = layers, prologue
        rows = sum(layer.output_size for layer in layers)
        self.shape = type("Shape", (), {"rows": rows, "k": layers[0].input_size})

    def __call__(
        self,
        x: Tensor,
        weight: Any,
        scales: Any,
        out: Tensor,
        residual: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        normed: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        if self._prologue == "norm":
            assert norm is not None
            x = rms_norm(x, *norm).to(x.dtype)
            if normed is not None:
                normed.copy_(x)
        elif self._prologue == "swiglu":
            gate, up = x.float().chunk(2, -1)
            x = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        elif self._prologue == "gated":
            assert factors is not None
            x = (x.float() * factors.repeat_interleave(128, -1)).to(x.dtype)
        y = torch.cat([layer(x)[0] for layer in self._layers], -1).float()
        return out.copy_(y if residual is None else y + residual.float())


class Kda:
    """Stands in for `KdaStep`."""

    max_tokens = 8

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __call__(
        self, projected: Tensor, normed: Tensor, w: Any, states: Any, batch: Any, out: Tensor
    ) -> None:
        out.copy_(kda_step_reference(self.shape, projected, normed, w, states, batch))


class Mla:
    """Stands in for `MlaPrepare`."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __call__(self, projected: Tensor, normed: Tensor, positions: Tensor, w: Any, inputs: Any) -> None:
        made = mla_prepare_reference(self.shape, projected, normed, positions, w)
        for name in ("query", "latent", "key", "gate"):
            getattr(inputs, name).copy_(getattr(made, name))


class Attention:
    """Stands in for `MlaAttention`."""

    max_tokens = 8

    def __init__(self, shape: Any, latent_contiguous: bool) -> None:
        self._shape = shape
        self.query = torch.zeros(
            self.max_tokens, shape.heads, shape.latent + shape.rope, dtype=torch.bfloat16
        )

    def __call__(
        self,
        projected: Tensor,
        normed: Tensor,
        positions: Tensor,
        w: Any,
        latent: Any,
        batch: Any,
        scale: float,
        gate: Tensor,
        out: Tensor,
    ) -> Tensor:
        made = mla_prepare_reference(self._shape, projected, normed, positions, w)
        gate.copy_(made.gate)
        self.query[: len(projected)] = latent_query_reference(made, latent)
        # The CPU backend's block table counts in sixteens; a GPU's in blocks of the cache.
        split = batch.cache.shape[1] // 16
        batch = dataclasses.replace(batch, blocks=batch.blocks[:, ::split] // split)
        return out.copy_(mla_attention_reference(made, latent, batch, scale))


class Block:
    """Stands in for `MoEDecoder`: vLLM's block behind the norm."""

    max_tokens = 8

    def __init__(self, block: Any) -> None:
        self._block = block

    def __call__(
        self, x: Tensor, weights: Any, out: Tensor, *_: float, residual: Tensor, norm: Any
    ) -> Tensor:
        return out.copy_(self._block(rms_norm(x, *norm).to(x.dtype)).float() + residual.float())


def _attention(layer: FusedLayer, **changes: Any) -> FusedLayer:
    return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **changes))


def _weights(layer: FusedLayer, **changes: Any) -> FusedLayer:
    return _attention(layer, weights=dataclasses.replace(layer.attention.weights, **changes))


def _latent(layer: FusedLayer, key: FusedLayer) -> FusedLayer:
    """With the projection of another layer's queries into the latent space."""
    own, other = layer.attention.latent, key.attention.latent  # type: ignore[union-attr]

    def weights() -> Any:
        return dataclasses.replace(own.weights(), key=other.weights().key)

    return _attention(layer, latent=dataclasses.replace(own, weights=weights))


LATENT_QUERY = "latent query"
# Per fault: the layer (KDA or MLA, see OTHER), its half, and the layer made wrong of it and of another one of its kind.
Fault = tuple[int, str, Callable[[Any, Any], FusedLayer]]
FAULTS: dict[str, Fault] = {
    "out_proj": (1, "attention", lambda a, b: _attention(a, out_proj=b.attention.out_proj)),
    "conv": (1, "attention", lambda a, b: _weights(a, q_conv=a.attention.weights.k_conv)),
    "decay": (1, "attention", lambda a, b: _weights(a, dt_bias=b.attention.weights.dt_bias)),
    "beta": (1, "attention", lambda a, b: _weights(a, b=b.attention.weights.b)),
    "gate": (5, "attention", lambda a, b: _weights(a, gate=b.attention.weights.gate)),
    "rotary": (5, "attention", lambda a, b: _weights(a, cos_sin=a.attention.weights.cos_sin.roll(5, 0))),
    LATENT_QUERY: (5, "attention", _latent),
    "experts": (2, "mlp", lambda a, b: dataclasses.replace(a, mlp=b.mlp)),
    "mlp norm": (
        2,
        "mlp",
        lambda a, b: dataclasses.replace(a, mlp=dataclasses.replace(a.mlp, norm=b.mlp.norm)),
    ),
}
OTHER = {1: 3, 2: 4, 5: 11}
SLOTS = 32


@contextmanager
def one_key(layers: Any) -> Iterator[None]:
    """A token sees one key, as in vLLM's warm-up; the cache's first, which is its own if it is alone."""
    plans = get_forward_context().attn_metadata
    with ExitStack() as stack:
        for attention in (layer.self_attn for layer in layers if hasattr(layer.self_attn, "mla_attn")):
            plan = plans[attention.mla_attn.mla_attn.layer_name].decode  # type: ignore[call-overload,index]
            for tensor, value in ((plan.seq_lens, 1), (plan.block_table, 0)):
                stack.callback(tensor.copy_, tensor.clone())
                tensor.fill_(value)
        yield


class CpuPath(fused.FusedPath):
    """Plain decodes as the CPU backend plans them; the check tells what it finds and changes nothing."""

    one_group = False
    model: Any = None
    checks: dict[str, dict[str, float]] | None = None
    attended = 0

    def _compared(self, tokens: int, batches: Mapping[str, KdaBatch]) -> bool:
        if self.checks is None:
            self._compare_all(tokens, batches)
        return True

    def _compare_all(self, tokens: int, batches: Mapping[str, KdaBatch]) -> None:
        built, layers = self._built, self.model.model.layers
        assert built is not None
        caches = [
            cache
            for layer in layers
            for cache in (
                layer.self_attn.kv_cache
                if hasattr(layer.self_attn, "f_proj")
                else [layer.self_attn.mla_attn.mla_attn.kv_cache]
            )
        ]
        caches = [cache[:SLOTS] for cache in caches]  # gigabytes in all, and few slots are in use
        kept = [cache.clone() for cache in caches]
        self.attended = built.body.attended(tokens)
        self.checks = {"sound": built.compare(tokens, batches)}
        self.checks["put back"] = {
            str(i): float(((a != b) & ~(a.isnan() & b.isnan())).sum())
            for i, (a, b) in enumerate(zip(caches, kept, strict=True))
        }
        stream = torch.randn(tokens, self.model.config.hidden_size, dtype=torch.bfloat16)
        for name, (at, _, fault) in () if self.one_group else FAULTS.items():
            wrong = list(built.body.layers)
            wrong[at] = fault(wrong[at], wrong[OTHER[at]])
            body = FusedBody(wrong, built.body.space)
            with one_key(layers), check.redirected(layers, wrong, batches, tokens):
                self.checks[name] = check.disagreements(layers, body, stream, batches)
                if name == LATENT_QUERY:
                    with mock.patch.object(check, "_inputs", lambda *_: 0.0):
                        self.checks["without inputs"] = check.disagreements(layers, body, stream, batches)
        for cache, values in zip(caches, kept, strict=True):
            cache.copy_(values)

    def _facts(self, tokens: int, unusual: str) -> tuple[BatchFacts, dict[str, KdaBatch]]:
        context = get_forward_context() if is_forward_context_available() else None
        plans = (context.attn_metadata or {}) if context is not None else {}
        if any(name not in plans for name in self._kda):
            return BatchFacts(tokens, 8, planned=False), {}
        batches = {}
        for name in self._kda:
            rows = plans[name].rows
            plain = [group for group in rows.steps if group.length == 1 and not group.fresh]
            if len(plain) != 1 or len(rows.steps) != 1 or rows.prefill is not None or rows.tokens != tokens:
                return BatchFacts(tokens, 8, prefills=1), {}
            batches[name] = KdaBatch(torch.tensor(plain[0].read, dtype=torch.int32))
        if self.one_group:
            batches = dict.fromkeys(batches, batches[self._kda[0]])
        return BatchFacts(tokens, 8), batches


class Kernels:
    """In place of `from_vllm.Kernels`."""

    def __init__(self, device: torch.device, cache: Any) -> None:
        self.device, self.kda, self.mla, self.attention = device, Kda, Mla, Attention


def install(model: Any, one_group: bool) -> None:
    """The fused path for a loaded CPU model."""

    def projection(kernels: Any, layers: Any, prologue: str, what: str) -> Projection:
        return Projection(Layers(layers, prologue), [], [])  # type: ignore[arg-type]

    def moe(block: Any, norm: Any, device: torch.device) -> MoELayer:
        return MoELayer(norm, Block(block), lambda: None, 1.0, 0.0, 0.0)  # type: ignore[arg-type,return-value]

    for module in (from_vllm, mla_from_vllm, fused):
        module.projection = projection  # type: ignore[attr-defined]
    from_vllm.moe_layer = moe  # type: ignore[assignment]
    fused.Kernels = Kernels  # type: ignore[attr-defined,assignment]
    for layer in model.model.layers:
        if (rotary := getattr(layer.self_attn, "rotary_emb", None)) is not None:
            type(rotary).__name__ = "RotaryEmbedding"  # ours for the CPU, which inherits from it
            rotary.cos_sin_cache = rotary.cos_sin_cache.to(torch.bfloat16)
    torch.cuda.is_current_stream_capturing = lambda: False
    kda = [layer.self_attn.prefix for layer in model.model.layers if hasattr(layer.self_attn, "f_proj")]
    model._fused = CpuPath("target", "fused", lambda device: fused.build_target(model, device), kda)
    model._fused.one_group, model._fused.model = one_group, model


def main(out: Path, how: str) -> None:
    sound = side.Recorder.__init__
    models = []

    def with_path(self: Any, model: Any, layers: Any) -> None:
        sound(self, model, layers)
        models.append(model)
        if how != "layers":
            install(model, how == "one group")

    # The CPU backend plans by lists of slots, which no tensor redirects.
    check._slots = lambda *_: iter(())  # type: ignore[assignment]

    # vLLM's CPU layers keep weights in a form of their own; the path reads those of a loaded model.
    packed = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: packed(layer, remove_weight=False)
    side.Recorder.__init__ = with_path  # type: ignore[method-assign]
    found = side.run_side(side.SideSpec({}, "mini", 12, (0, 5, 11)))
    planted = {name: f"layer {at} {half}" for name, (at, half, _) in FAULTS.items()}
    path = models[0]._fused
    found |= {"checks": getattr(path, "checks", None) or {}, "attended": getattr(path, "attended", 0)}
    torch.save(found | {"planted": planted}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
