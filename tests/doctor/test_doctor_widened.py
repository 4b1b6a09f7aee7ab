# SPDX-License-Identifier: Apache-2.0
"""The widened tiny-ling is the same function as tiny-ling, in shapes that the decode kernels and two ranks take."""

import json
from pathlib import Path

import pytest
import torch

from tests.doctor import widened
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.decode.shapes import fused_problem
from vllm_ling.quant.decode_moe import MoEShape, unsupported
from vllm_ling.reference.load import from_checkpoint


def distance(folder: Path) -> float:
    """Relative RMS of its logits from tiny-ling's."""
    tokens = torch.arange(4, 64).unsqueeze(0) * 7 % 700
    with torch.no_grad():
        right, found = (from_checkpoint(path)(tokens) for path in (tiny_ling_path(), folder))
    return float((found - right).norm() / right.norm())


def test_it_computes_the_same(tmp_path: Path) -> None:
    assert distance(widened.widen(tmp_path / "model")) < 1e-5


def test_experts_that_can_be_chosen_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "NEVER_CHOSEN", 0.0)
    assert distance(widened.widen(tmp_path / "model")) > 1e-2


def test_every_kernel_and_two_ranks_take_its_shapes(tmp_path: Path) -> None:
    config = json.loads((widened.widen(tmp_path / "model") / "config.json").read_text())
    narrow = json.loads((tiny_ling_path() / "config.json").read_text())

    def problems(config: dict[str, int]) -> list[str | None]:
        experts = MoEShape(
            hidden=config["hidden_size"],
            intermediate=config["moe_intermediate_size"],
            experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            groups=config["n_group"],
            top_groups=config["topk_group"],
            shared_intermediate=config["moe_shared_expert_intermediate_size"],
            gate_bf16=False,
        )
        return [fused_problem(LingShape.from_config(config)), unsupported(experts)]

    def blocks(config: dict[str, int]) -> float:
        """Blocks of 128 rows in each rank's query projection."""
        head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        return config["num_attention_heads"] / 2 * head / 128

    assert problems(config) == [None, None] and blocks(config).is_integer()
    assert None not in problems(narrow) and not blocks(narrow).is_integer()
