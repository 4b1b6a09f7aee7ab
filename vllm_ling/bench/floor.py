# SPDX-License-Identifier: Apache-2.0
"""Bytes that a side's workload must read and write per emitted token, by the byte model of `vllm-ling roofline`."""

import tempfile
from functools import cache
from pathlib import Path

from vllm_ling.bench.engine import model_folder
from vllm_ling.bench.side import Side
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.roofline.bytes import ByteModel


def floor_bytes(side: Side, context: int) -> int:
    """The floor with `context` tokens in the cache (those of the prompt; the answer's own are left out).

    Head: FP8 for ours unless `lm_head` is bf16; BF16 for stock, whose drafts have an FP8 copy.
    """
    shape = _shape(side.model, side.layers, bool(side.draft_tokens))
    fp8 = side.options is not None and side.options.get("lm_head") != "bf16"
    target = ByteModel(shape, head="fp8" if fp8 else "bf16", context=context)
    total = target.step_bytes(side.draft_tokens + 1)
    if side.draft_tokens:
        draft = ByteModel(shape, head="fp8" if fp8 or side.options is None else "bf16", context=context)
        total += side.draft_tokens * draft.draft_bytes()
    return round(total / side.tokens_per_step)


@cache
def _shape(model: str, layers: int, mtp: bool) -> LingShape:
    with tempfile.TemporaryDirectory() as folder:
        return LingShape.from_folder(model_folder(Path(folder), model, layers, mtp=mtp))
