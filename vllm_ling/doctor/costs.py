# SPDX-License-Identifier: Apache-2.0
"""What a finding costs, from the byte model: extra bytes per token, and their time on this machine or on a GB10."""

import dataclasses
from typing import Any

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.roofline.bytes import ByteModel, expected_union
from vllm_ling.roofline.machines import MACHINES, Machine, matching_gpu

_REFERENCE = "gb10-achievable"
# Weights of routed experts held in BF16 instead of MXFP4: 16 bits instead of 4.25.
_BF16_OVER_MXFP4 = 16 / 4.25


def model(facts: Facts, **changes: Any) -> ByteModel | None:
    """Byte model of the checkpoint with the head as it is served, None if the checkpoint is not known."""
    shape = facts.get("_checkpoint.shape")
    if shape is None:
        return None
    head = facts.get("record.choices", {}).get("lm_head", ["bf16"])[0]
    return ByteModel(shape, **({"head": "bf16" if head == "bf16" else "fp8"} | changes))


def place(facts: Facts) -> Machine:
    """This machine if its GPU is known, else the reference machine."""
    return matching_gpu(facts.get("gpu.names", [])) or MACHINES[_REFERENCE]


def extra_bytes(facts: Facts, count: float, unit: str = "token") -> str:
    """`count` bytes more per token or round, as a phrase with the time they take."""
    machine = place(facts)
    amount = size(count)
    name = machine.gpu or machine.name
    time = machine.milliseconds(count)
    return (
        f"reads {amount} more per {unit}: about {time:.1f} ms on {name}"
        if time >= 0.05
        else (f"reads {amount} more per {unit}: under 0.1 ms on {name}")
    )


def size(count: float) -> str:
    """`count` bytes in GB, or in MB where little is left of that."""
    return f"{count / 1e9:.2f} GB" if count >= 5e6 else f"{count / 1e6:.2f} MB"


def bf16_head(facts: Facts) -> str:
    """A BF16 head instead of an FP8 one."""
    bytes_model = model(facts)
    if bytes_model is None:
        return ""
    plain = dataclasses.replace(bytes_model, head="bf16").step_bytes()
    return extra_bytes(facts, plain - dataclasses.replace(bytes_model, head="fp8").step_bytes())


def stock_head(facts: Facts) -> str:
    """Stock vLLM's BF16 head, where the plugin would have served an FP8 one."""
    quantized = facts.get("checkpoint.format", "bf16") != "bf16"
    return bf16_head(facts) if quantized else ""


def useless_drafts(facts: Facts, k: int, useful: int) -> str:
    """What a round with `k` drafts reads more than one with the `useful` first ones."""
    bytes_model = model(facts)
    if bytes_model is None or not bytes_model.shape.num_nextn_predict_layers:
        return ""
    return extra_bytes(facts, bytes_model.round_bytes(k) - bytes_model.round_bytes(useful), "round")


def head_bytes(facts: Facts) -> float | None:
    """Size of a BF16 head in bytes."""
    shape = facts.get("_checkpoint.shape")
    return None if shape is None else 2.0 * shape.vocab_size * shape.hidden_size


def bf16_experts(facts: Facts) -> str:
    """Routed experts in BF16 instead of MXFP4."""
    routed = _part(facts, "routed experts")
    return "" if routed is None else extra_bytes(facts, routed * (_BF16_OVER_MXFP4 - 1))


def fp32_router(facts: Facts) -> str:
    """Router weights in FP32 instead of BF16."""
    router = _part(facts, "router")
    return "" if router is None else extra_bytes(facts, router / 2)


def _part(facts: Facts, name: str) -> float | None:
    bytes_model = model(facts)
    if bytes_model is None:
        return None
    return next(part.bytes for part in bytes_model.parts() if part.name == name)


def speculation_gain(facts: Facts, k: int, length: float) -> float | None:
    """Bytes per token without speculation over those with `k` drafts at this accept length; above 1 it pays."""
    bytes_model = model(facts)
    if bytes_model is None or not bytes_model.shape.num_nextn_predict_layers:
        return None
    return bytes_model.step_bytes() / (bytes_model.round_bytes(k) / length)


def batched_gain(facts: Facts, k: int, length: float, sequences: int) -> float | None:
    """As `speculation_gain` for `sequences` sequences decoded together: the union of their experts is read."""
    bytes_model = model(facts)
    if bytes_model is None or not bytes_model.shape.num_nextn_predict_layers:
        return None
    return _batch_bytes(bytes_model, sequences, 0) / (_batch_bytes(bytes_model, sequences, k) / length)


def _batch_bytes(bytes_model: ByteModel, sequences: int, k: int) -> float:
    """Bytes of one step of `sequences` sequences with `k` drafts each; KV cache of one sequence as in the model."""
    shape = bytes_model.shape
    tokens = sequences * (k + 1)
    one = expected_union(shape.num_experts, shape.num_experts_per_tok, 1)
    parts = {part.name: part.bytes for part in bytes_model.parts()}
    growing = ("routed experts", "KDA state", "MLA KV cache")
    fixed = sum(size for name, size in parts.items() if name not in growing)
    union = expected_union(shape.num_experts, shape.num_experts_per_tok, tokens)
    experts = parts["routed experts"] / one * union
    per_sequence = parts["KDA state"] + parts["MLA KV cache"]
    draft = 0.0
    if k:
        moved = {part.name: part.bytes for part in bytes_model.draft_parts()}
        routed = moved.pop("MTP routed experts")
        draft_union = expected_union(shape.num_experts, shape.num_experts_per_tok, sequences)
        draft = k * (sum(moved.values()) + routed / one * draft_union)
    return fixed + experts + sequences * per_sequence + draft
