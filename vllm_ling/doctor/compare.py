# SPDX-License-Identifier: Apache-2.0
"""One pass over the 127,000 tensors of a full-size checkpoint: what is declared against what is stored."""

from dataclasses import dataclass, field

from vllm_ling.checkpoint.headers import TensorInfo
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.tensors import TensorSpec, expected_tensors
from vllm_ling.doctor.facts.store import Facts

# The head may be stored in FP8 with a scale of its own; the table lists it in BF16.
HEAD_NAMES = ("lm_head.weight", "lm_head.weight_scale", "lm_head.weight_scale_inv")


@dataclass
class Comparison:
    """Names of tensors that differ, by how; the MTP layer's missing ones apart."""

    expected: dict[str, TensorSpec]
    headers: dict[str, TensorInfo]
    missing: list[str] = field(default_factory=list)
    missing_mtp: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)


def mtp_prefixes(shape: LingShape) -> tuple[str, ...]:
    """Prefixes of the MTP layers' tensors; empty without such layers."""
    return tuple(f"model.layers.{layer}." for layer in shape.layers[shape.num_hidden_layers :])


def comparison(facts: Facts) -> Comparison:
    """The comparison, made once per run.

    Raises:
        MissingFact: config or headers are not known.
    """
    if "_checkpoint.comparison" not in facts:
        shape: LingShape = (
            facts["_checkpoint.shape"] if "_checkpoint.shape" in facts else facts["checkpoint.format"]
        )
        headers = (
            facts["_checkpoint.headers"] if "_checkpoint.headers" in facts else facts["checkpoint.headers"]
        )
        facts.put("_checkpoint.comparison", _compare(shape, headers), "config.json and headers")
    found: Comparison = facts["_checkpoint.comparison"]
    return found


def _compare(shape: LingShape, headers: dict[str, TensorInfo]) -> Comparison:
    expected = expected_tensors(shape)
    result = Comparison(expected, headers)
    mtp = mtp_prefixes(shape)
    for name, spec in expected.items():
        info = headers.get(name)
        if info is None:
            (result.missing_mtp if mtp and name.startswith(mtp) else result.missing).append(name)
        elif info.shape != spec.shape:
            result.wrong_shape.append(name)
        elif info.dtype not in spec.dtypes and name not in HEAD_NAMES:
            result.wrong_dtype.append(name)
    extra = headers.keys() - expected.keys()
    result.left_over = [name for name in headers if name in extra and name not in HEAD_NAMES] if extra else []
    return result
