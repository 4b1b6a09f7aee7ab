# SPDX-License-Identifier: Apache-2.0
"""Puts the fused path beside vLLM's layers: a batch it suits goes through it, every other one through vLLM.

It is built at the first batch that it suits and that is not being captured, so after loading, and takes no batch of a
kind that has not been compared with vLLM's layers (`compared.py`); vLLM warms up every batch size before it captures
the size's graph. What keeps a model or a batch on vLLM's layers is logged once, with its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from vllm_ling.decode.body import FusedBody, FusedLayer
from vllm_ling.decode.check import away, disagreements, redirected
from vllm_ling.decode.compared import Comparisons, kind_of
from vllm_ling.decode.from_vllm import (
    Kernels,
    Unsuitable,
    kda_batches,
    kda_layer,
    mlp_layer,
    norm_of,
    projection,
    states_problem,
)
from vllm_ling.decode.kda_step import KdaBatch
from vllm_ling.decode.layers import DenseLayer, Entry, KdaLayer, Workspace
from vllm_ling.decode.mla_from_vllm import mla_layer
from vllm_ling.decode.policy import BatchFacts, choose_path
from vllm_ling.quant.jit import default_cache
from vllm_ling.status import choose, warning

# What the FP8 kernels read about as fast as one token; the plan of the other kernels may allow less.
MAX_TOKENS = 8
_SPACES: dict[int, Workspace] = {}


def _space(device: torch.device) -> Workspace:
    """One workspace per device: target and draft take turns."""
    return _SPACES.setdefault(device.index or 0, Workspace(MAX_TOKENS, device))


class FusedPath:
    """Decides per batch and builds on first use. `what` names the model in the log.

    Args:
        build: makes the path's layers from loaded modules; raises `Unsuitable`.
        kda: prefixes of the KDA layers, whose attention plans describe the batch; none of a draft.
    """

    def __init__(
        self, what: str, option: str, build: Callable[[torch.device], "Built"], kda: Sequence[str] = ()
    ) -> None:
        self._what, self._option, self._build, self._kda = what, option, build, kda
        self._built: Built | None = None
        self._comparisons = Comparisons(what)
        self._refused = ""
        self._said: set[str] = set()

    def take(
        self, tokens: int, device: torch.device, unusual: str
    ) -> "tuple[Built, dict[str, KdaBatch]] | None":
        """The built path and each KDA layer's sequences if this batch takes it, else None."""
        if self._refused:
            return None
        facts, batches = self._facts(tokens, unusual)
        path, reason = choose_path(facts)
        if path == "fused" and self._built is None:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._try_to_build(device)
            if self._built is None:
                return None
            facts, batches = self._facts(tokens, unusual)
            path, reason = choose_path(facts)
        if path == "fused" and not self._compared(tokens, batches):
            return None
        if facts.planned and reason not in self._said:
            self._said.add(reason)
            choose(f"{self._what} path: {reason}", path, f"ling.decode={self._option}")
        return (self._built, batches) if path == "fused" and self._built is not None else None

    def _facts(self, tokens: int, unusual: str) -> tuple[BatchFacts, dict[str, KdaBatch]]:
        most = self._built.most if self._built is not None else MAX_TOKENS
        context = get_forward_context() if is_forward_context_available() else None
        plans = context.attn_metadata if context is not None else None
        if not isinstance(plans, dict) or any(plans.get(name) is None for name in self._kda):
            return BatchFacts(tokens, most, planned=False), {}
        # vLLM plans the captures of pieces like decodes, but replays them for prompts.
        pieces = context is not None and context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        if not self._kda:
            return BatchFacts(tokens, most, pieces=pieces, unusual=unusual), {}
        plan = plans[self._kda[0]]  # the groups differ in slots, not in what they are asked
        drafts = plan.spec_sequence_masks is not None
        facts = BatchFacts(
            tokens,
            most,
            prefills=plan.num_prefills,
            mixed=drafts and plan.num_decodes > 0,
            pieces=pieces,
            unusual=unusual,
        )
        if choose_path(facts)[0] != "fused":
            return facts, {}
        if not (drafts or plan.num_decodes):
            return BatchFacts(tokens, most, unusual="no sequence is decoded"), {}
        batches, problem = kda_batches(plans, self._kda, tokens)
        if problem:
            return BatchFacts(tokens, most, unusual=problem), {}
        return BatchFacts(tokens, most, longest=batches[self._kda[0]].longest), batches

    def _try_to_build(self, device: torch.device) -> None:
        try:
            if is_breakable_cudagraph_enabled():
                raise Unsuitable("VLLM_USE_BREAKABLE_CUDAGRAPH captures what it would do for a prompt too")
            self._built = self._build(device)
            choose(
                f"{self._what} decode",
                "fused",
                f"up to {self._built.most} tokens; ling.decode={self._option}",
            )
        except Exception as error:  # whatever is wrong, vLLM's layers can serve
            self._refuse(str(error) if isinstance(error, Unsuitable) else f"{type(error).__name__}: {error}")

    def _compared(self, tokens: int, batches: Mapping[str, KdaBatch]) -> bool:
        """Whether this kind of batch agrees with vLLM's layers; the first one outside a capture is compared."""
        assert self._built is not None
        built = self._built
        try:
            kind = kind_of(tokens, batches, built.body.attended(tokens))
        except Exception as error:
            self._refuse(f"its attention cannot read the batch: {type(error).__name__}: {error}")
            return False
        if self._comparisons.cover(kind):
            return True
        if torch.cuda.is_current_stream_capturing():
            self._comparisons.wait(kind, "a graph was captured before such a batch could be compared")
            return False
        if problem := self._comparisons.make(kind, lambda: built.compare(tokens, batches)):
            self._refuse(problem)
            return False
        return self._comparisons.cover(kind)

    def _refuse(self, reason: str) -> None:
        self._built, self._refused = None, reason
        if self._option == "fused":
            warning(f"ling.decode=fused cannot be honoured ({reason}); vLLM's layers decode")
        choose(f"{self._what} decode", "layers", reason)


class Built:
    """Layers ready to run.

    Attributes:
        most: tokens that they take.
        compare: compares them with vLLM's layers, see `check.disagreements`; of a number of tokens and a batch. Raises
            `NotChecked` before it computes anything where the batch leaves no room.
        entry: of the MTP layer.
    """

    def __init__(
        self,
        body: FusedBody,
        most: int,
        compare: Callable[[int, Mapping[str, KdaBatch]], dict[str, float]],
        entry: Entry | None = None,
    ) -> None:
        self.body, self.most, self.compare, self.entry = body, most, compare, entry


def build_target(model: Any, device: torch.device) -> Built:
    """The whole body of a `LingForCausalLM`.

    Raises:
        Unsuitable: naming what our kernels cannot serve.
    """
    kernels = Kernels(device, default_cache())
    layers = [_layer(kernels, layer) for layer in model.model.layers]
    for layer in layers:
        if isinstance(layer.attention, KdaLayer) and (problem := states_problem(layer.attention)):
            raise Unsuitable(problem)
    body = FusedBody(layers, _space(device))

    def compare(tokens: int, batches: Mapping[str, KdaBatch]) -> dict[str, float]:
        embedding, stock = model.model.word_embeddings, model.model.layers
        with redirected(stock, layers, batches, tokens):
            ids = torch.randint(
                embedding.org_vocab_size, (tokens,), generator=_generator(device), device=device
            )
            return disagreements(stock, body, embedding(ids), batches)

    return Built(body, min(map(_most, layers)), compare)


def build_draft(layer: Any, device: torch.device) -> Built:
    """The MTP layer between the joined embedding and hidden state and its final norm.

    Raises:
        Unsuitable: naming what our kernels cannot serve.
    """
    kernels = Kernels(device, default_cache())
    fused = _layer(kernels, layer)
    left, (right, eps) = norm_of(layer.enorm), norm_of(layer.hnorm)
    if eps != left[1]:
        raise Unsuitable("the norms before eh_proj have different epsilons")
    entry = Entry(projection(kernels, (layer.eh_proj,), "joined", "eh_proj"), left, right)
    body = FusedBody([fused], _space(device))

    def compare(tokens: int, batches: Mapping[str, KdaBatch]) -> dict[str, float]:
        with redirected([layer], [fused], batches, tokens):
            shape = (2, tokens, left[0].shape[0])
            given = torch.randn(shape, generator=_generator(device), device=device, dtype=torch.float32)
            embeds, hidden = given.to(torch.bfloat16)
            theirs = layer.eh_proj(torch.cat([layer.enorm(embeds), layer.hnorm(hidden)], -1))
            mine = entry(embeds, hidden, torch.empty_like(theirs))
            found = {"eh_proj": away(mine, theirs, torch.zeros_like(theirs), "eh_proj")}
            return found | disagreements([layer], body, theirs, batches)

    return Built(body, min(_most(fused), entry.max_tokens), compare, entry)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _layer(kernels: Kernels, layer: Any) -> FusedLayer:
    attention, norm = layer.self_attn, norm_of(layer.input_layernorm)
    is_kda = isinstance(attention, BailingMoeV3KimiDeltaAttention)
    return FusedLayer(
        kda_layer(kernels, attention, norm) if is_kda else mla_layer(kernels, attention, norm),
        mlp_layer(kernels, layer.mlp, norm_of(layer.post_attention_layernorm)),
    )


def _most(layer: FusedLayer) -> int:
    """The most tokens that all kernels of a layer take."""
    kernels: list[Any] = [layer.attention.in_proj.gemv, layer.attention.out_proj.gemv]
    kernels += [layer.attention.step] if isinstance(layer.attention, KdaLayer) else []
    if isinstance(layer.mlp, DenseLayer):
        kernels += [layer.mlp.up.gemv, layer.mlp.down.gemv]
    else:
        kernels += [layer.mlp.decoder]
    return min(MAX_TOKENS, *(kernel.max_tokens for kernel in kernels))
