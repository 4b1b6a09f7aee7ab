# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensor names -> names of vLLM parameters, for the target and for its MTP draft."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(.+)$")
_EXPERT_SHARDS = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
# (merged parameter, part, shard index). A part that the model did not merge keeps its own name.
MERGED = (
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
    ("qkv_proj", "q_proj", 0),
    ("qkv_proj", "k_proj", 1),
    ("qkv_proj", "v_proj", 2),
    ("qkvb_proj", "q_proj", 0),
    ("qkvb_proj", "k_proj", 1),
    ("qkvb_proj", "v_proj", 2),
    ("qkvb_proj", "b_proj", 3),
    ("fused_qkv_a_proj", "q_a_proj", 0),
    ("fused_qkv_a_proj", "kv_a_proj_with_mqa", 1),
)


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes: a parameter, and which part of it.

    `shard` is None for a whole parameter, an index into a merged one, or (expert id, "w1"|"w2"|"w3").
    """

    name: str
    shard: int | tuple[int, str] | None = None


Place = Target | Literal["elsewhere"] | None
"""Target, "elsewhere" if another model loads the tensor, None if nobody does."""


def place(name: str, parameters: Any) -> Target | None:
    """Finds the parameter (of `parameters`, a container of names) that an official tensor name belongs to."""
    name = name.replace(".attention.", ".self_attn.")
    if (expert := _EXPERT.search(name)) is not None:
        stem, shard = _EXPERT_SHARDS[expert[2]]
        prefix = name[: expert.start()] + f".mlp.experts.routed_experts.{stem}_"
        # MXFP4 scales are called weight_scale_inv in the file and weight_scale in vLLM's MXFP4 methods.
        for suffix in (expert[3], expert[3].removesuffix("_inv")):
            if prefix + suffix in parameters:
                return Target(prefix + suffix, (int(expert[1]), shard))
        return None
    if name in parameters:
        return Target(name)
    for merged, part, index in MERGED:
        candidate = name.replace(f".{part}.", f".{merged}.")
        if candidate != name and candidate in parameters:
            return Target(candidate, index)
    return None


def layer_index(name: str) -> int | None:
    """The decoder layer a checkpoint tensor belongs to, or None."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def target_name(config: Any) -> Callable[[str, Any], Place]:
    """Placement for the target model: everything but the MTP layers, which the draft loads."""

    def find(name: str, parameters: Any) -> Place:
        layer = layer_index(name)
        if layer is not None and config.num_hidden_layers <= layer < config.num_hidden_layers + _mtp_layers(
            config
        ):
            return "elsewhere"
        return place(name, parameters)

    return find


def draft_name(config: Any) -> Callable[[str, Any], Place]:
    """Placement for the draft: its own layers and the embedding; the head is shared, the body is the target's."""

    def find(name: str, parameters: Any) -> Place:
        if name == "model.word_embeddings.weight":
            return Target("model.embed_tokens.weight")
        layer = layer_index(name)
        if layer is None or layer < config.num_hidden_layers:
            return "elsewhere"
        return place(name, parameters)

    return find


def _mtp_layers(config: Any) -> int:
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)
