# SPDX-License-Identifier: Apache-2.0
"""The widened tiny-ling is the same function as tiny-ling, in shapes that the decode kernels and two ranks take."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import widened
from tests.unit.checkpoint_files import single_thread
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.eval.studies.answers import TinyAnswers
from vllm_ling.quant import fp8_gemv
from vllm_ling.quant.fp8_gemv import GemvShape
from vllm_ling.quant.tune import GPUS, Job, jobs
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.speculate import speculate
from vllm_ling.tiny.evaluate import MAX_NEW_TOKENS

__all__ = ["single_thread"]
pytestmark = pytest.mark.usefixtures("single_thread")

# Each with its own `unsupported` and `plan`; the three of MLA's attention share theirs.
KERNELS = {"moe_block", "fp8_gemv", "kda_step", "mla_prepare", "mla_attend", "mla_absorb", "mla_merge"}
# The fused path takes 8 tokens at most.
NEEDLESS = {"FP8 256 x 512, prologue joined, 16 tokens"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened.widen(tmp_path_factory.mktemp("wide") / "model")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def distance(folder: Path) -> float:
    """Relative RMS of its logits from tiny-ling's."""
    tokens = torch.arange(4, 64).unsqueeze(0) * 7 % 700
    with torch.no_grad():
        right, found = (from_checkpoint(path)(tokens) for path in (tiny_ling_path(), folder))
    return float((found - right).norm() / right.norm())


def test_it_computes_the_same(wide: Path) -> None:
    assert distance(wide) < 1e-5


def test_its_greedy_answers_and_its_drafts_are_tiny_lings(wide: Path) -> None:
    answers, model = TinyAnswers(8), from_checkpoint(wide)
    assert model.generate(answers.prompts, MAX_NEW_TOKENS, frozenset(answers.stop)) == answers.tokens
    drafted = speculate(model, answers.prompts, answers.tokens, 3)
    assert drafted.accept_length == answers.accept_length(3) > 1.5


def test_experts_that_can_be_chosen_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "NEVER_CHOSEN", 0.0)
    assert distance(widened.widen(tmp_path / "model")) > 1e-2


def h200_jobs(folder: Path) -> list[Job]:
    """What serving on an H200 asks for, target and draft: each has constants where the kernel takes the shape and its
    launch can be planned."""
    return list(jobs(LingShape.from_config(config_of(folder)), GPUS["h200"]))


def test_every_kernel_takes_its_shapes_on_an_h200(wide: Path) -> None:
    found = h200_jobs(wide)
    assert {job.label: job.problem for job in found if job.defines is None}.keys() == NEEDLESS
    assert {job.source.removesuffix(".cu") for job in found if job.defines} == KERNELS
    assert any("prologue joined, 8 tokens" in job.label for job in found if job.defines), "the draft's"


def test_our_fp8_kernel_takes_the_layers_that_tune_leaves_out_too(wide: Path) -> None:
    """Those whose weights our MoE block and attention read themselves: prompts go through vLLM's modules."""
    config = config_of(wide)
    hidden, shared = config["hidden_size"], config["moe_shared_expert_intermediate_size"]
    latent_rows = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["v_head_dim"])
    for rows, k in ((2 * shared, hidden), (hidden, shared), (latent_rows, config["kv_lora_rank"])):
        shape = GemvShape(rows, k, row_scales=False)
        assert fp8_gemv.unsupported(shape) is None
        assert all(fp8_gemv.plan(shape, tokens, GPUS["h200"]) for tokens in (1, 4, 8))


def test_tiny_ling_itself_is_refused_there() -> None:
    problems = " ".join({job.problem for job in h200_jobs(tiny_ling_path())})
    assert "16 experts: not a multiple of 32" in problems and "2 heads are not a multiple of 4" in problems


def test_two_ranks_take_its_blocks_and_not_tiny_lings(wide: Path) -> None:
    def blocks(config: dict[str, Any]) -> float:
        """Blocks of 128 rows in each rank's query projection."""
        head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        return float(config["num_attention_heads"] / 2 * head / 128)

    assert blocks(config_of(wide)).is_integer() and not blocks(config_of(tiny_ling_path())).is_integer()
