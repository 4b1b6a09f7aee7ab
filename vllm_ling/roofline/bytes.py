# SPDX-License-Identifier: Apache-2.0
"""Bytes that decoding must move through device memory: per step, per draft step, per speculative round, per token.

A lower bound from the checkpoint's own bytes: every weight once per step, activations and kernel scratch not at all.
Sizes come from the table of checkpoint tensors, so they follow format, exclusions and dimensions by themselves.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.tensors import TensorSpec, expected_tensors
from vllm_ling.errors import LingError

HeadFormat = Literal["bf16", "fp8"]
_DTYPE_BYTES = {"BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I32": 4}
_KV_BYTES = 2  # BF16 latent cache
_STATE_BYTES = 4  # FP32 recurrent state


@dataclass(frozen=True)
class Part:
    """One kind of traffic in a step."""

    name: str
    bytes: float


def expected_union(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens are expected to choose, each `top_k` of `experts`, independently."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def accept_length(acceptance: float, k: int) -> float:
    """Tokens per round if each draft token is accepted with the same probability, given those before it were."""
    return float(sum(acceptance**i for i in range(k + 1)))


@dataclass(frozen=True)
class ByteModel:
    """What one model reads, all sizes in bytes.

    Attributes:
        shape: dimensions and storage format.
        head: how the output head is stored; the draft reads the same one.
        context: tokens in the KV cache.
        router_bytes: per weight of the router; 4 as vLLM loads it, 2 where it stays BF16.
        draft_rows: rows of a smaller draft head, stored as `head`; None reads the full head.
        state_writes: "once" commits one KDA state per step; "per_token" writes one per verified token, as vLLM's
            speculative kernel does.
    """

    shape: LingShape
    head: HeadFormat = "bf16"
    context: int = 0
    router_bytes: int = 4
    draft_rows: int | None = None
    state_writes: Literal["once", "per_token"] = "once"

    def __post_init__(self) -> None:
        if self.context < 0:
            raise LingError(f"context is {self.context}, expected a number of tokens from 0 upwards")
        rows = self.draft_rows
        if rows is not None and not 1 <= rows <= self.shape.vocab_size:
            raise LingError(f"draft_rows is {rows}, expected 1 to {self.shape.vocab_size}")

    def parts(self, tokens: int = 1) -> list[Part]:
        """Traffic of one target step over `tokens` tokens of one sequence (1: plain decode, k + 1: verify)."""
        s, sizes = self.shape, self._target
        kda = sum(s.is_kda(layer) for layer in range(s.num_hidden_layers))
        moe = sum(s.is_moe(layer) for layer in range(s.num_hidden_layers))
        state = kda * s.num_attention_heads * s.head_dim**2 * _STATE_BYTES
        writes = tokens if self.state_writes == "per_token" else 1
        return [
            Part("KDA projections", sizes["kda"]),
            Part("MLA projections", sizes["mla"]),
            Part("dense MLP", sizes["dense"]),
            Part("shared expert", sizes["shared"]),
            Part("router", moe * self._router),
            Part("routed experts", moe * self._experts(tokens)),
            Part("output head", self._head_bytes(s.vocab_size)),
            Part("KDA state", state * (1 + writes)),
            Part("MLA KV cache", (s.num_hidden_layers - kda) * self._kv_cache),
            Part("norms and embedding rows", sizes["norm"] + tokens * 2 * s.hidden_size),
        ]

    def step_bytes(self, tokens: int = 1) -> float:
        """Sum of `parts(tokens)`."""
        return sum(part.bytes for part in self.parts(tokens))

    def draft_parts(self) -> list[Part]:
        """Traffic of one draft step of the MTP layer.

        Raises:
            LingError: the model has no MTP layer.
        """
        s, sizes = self.shape, self._mtp
        if not s.num_nextn_predict_layers:
            raise LingError("this model has no MTP layer (num_nextn_predict_layers is 0), so k must be 0")
        rows = self.draft_rows or s.vocab_size
        return [
            Part("MTP projections", sizes["mla"] + sizes["mtp"]),
            Part("MTP shared expert", sizes["shared"] + sizes["dense"]),
            Part("MTP router", self._router),
            Part("MTP routed experts", self._experts(1)),
            Part("draft head", self._head_bytes(rows)),
            Part("MTP KV cache", self._kv_cache),
            Part("MTP norms and embedding row", sizes["norm"] + 2 * s.hidden_size),
        ]

    def draft_bytes(self) -> float:
        """Sum of `draft_parts()`."""
        return sum(part.bytes for part in self.draft_parts())

    def round_bytes(self, k: int) -> float:
        """A speculative round with `k` drafts: `k` draft steps and the verification of k + 1 tokens; 0 is plain decode.

        The first draft step also runs the MTP layer over the tokens just accepted; its few extra experts (below 1% of a
        round) are not counted.
        """
        if k < 0:
            raise LingError(f"k is {k}, expected a number of draft tokens from 0 upwards")
        return self.step_bytes(k + 1) + (k * self.draft_bytes() if k else 0.0)

    def bytes_per_token(self, k: int, accept_length: float) -> float:
        """Bytes per emitted token of rounds with `k` drafts that emit `accept_length` tokens (1 to k + 1)."""
        if not 1 <= accept_length <= k + 1:
            raise LingError(
                f"accept length {accept_length} is impossible with k = {k}: it lies between 1 and {k + 1}"
            )
        return self.round_bytes(k) / accept_length

    @cached_property
    def _target(self) -> dict[str, float]:
        return self._sizes(mtp=False)

    @cached_property
    def _mtp(self) -> dict[str, float]:
        return self._sizes(mtp=True)

    @cached_property
    def _tables(self) -> dict[str, TensorSpec]:
        # One expert is enough: all have the same size, and 512 of them in 41 layers make a slow table.
        return expected_tensors(dataclasses.replace(self.shape, num_experts=1))

    def _sizes(self, mtp: bool) -> dict[str, float]:
        """Weight bytes of the body, or of the MTP layers, by kind; head, embedding, router and experts left out."""
        sizes = dict.fromkeys(("kda", "mla", "dense", "shared", "norm", "mtp"), 0.0)
        for name, spec in self._tables.items():
            if spec.role in ("embedding", "head", "router", "experts"):
                continue
            words = name.split(".")
            layer = int(words[2]) if words[1] == "layers" else -1
            if (layer >= self.shape.num_hidden_layers) != mtp:
                continue
            kind = spec.role if ".attention." not in name else "kda" if self.shape.is_kda(layer) else "mla"
            sizes[kind] += _stored(spec)
        return sizes

    @property
    def _router(self) -> int:
        return self.shape.num_experts * (self.shape.hidden_size * self.router_bytes + 4)

    @cached_property
    def _expert(self) -> float:
        last = self.shape.layers[-1]
        prefix = f"model.layers.{last}.mlp.experts.0."
        specs = (spec for name, spec in self._tables.items() if name.startswith(prefix))
        return sum(
            _stored(spec) for spec in specs if spec.shape != (2,)
        )  # INT4's weight_shape is read at load only

    def _experts(self, tokens: int) -> float:
        return self._expert * expected_union(self.shape.num_experts, self.shape.num_experts_per_tok, tokens)

    def _head_bytes(self, rows: int) -> float:
        hidden = self.shape.hidden_size
        return rows * (hidden + 4) if self.head == "fp8" else rows * hidden * 2

    @property
    def _kv_cache(self) -> float:
        return (self.shape.kv_lora_rank + self.shape.qk_rope_head_dim) * _KV_BYTES * self.context


def _stored(spec: TensorSpec) -> float:
    size = _DTYPE_BYTES[spec.dtypes[0]]
    for extent in spec.shape:
        size *= extent
    return size
