# SPDX-License-Identifier: Apache-2.0
"""A whole engine on the CPU against the fp32 reference, where states and cache blocks change hands.

More requests than slots, one-token prompts that join running decodes, and drafts of which about half are accepted, so
that requests end at different times and blocks are recycled while others run.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_ling.checkpoint.synthetic import mini_config, random_tensors
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.reference.load import from_checkpoint

TOKENS = 40
LENGTHS = (1, 70, 1, 17, 40, 1, 2, 33, 1, 16, 130, 1, 15, 5, 1, 64)

pytestmark = pytest.mark.slow


def agreeable_checkpoint(folder: Path) -> Path:
    """Random weights whose MTP layer often guesses right: the next token depends on the last one above all."""
    config = mini_config("flash", "bf16", mtp=True, clamp=0.3)
    tensors = random_tensors(config, seed=11)
    generator = torch.Generator().manual_seed(12)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight")):
            tensor *= 0.03
    mtp = f"model.layers.{config['num_hidden_layers']}"
    eye = torch.eye(hidden)
    tensors |= {
        "model.word_embeddings.weight": torch.randn(vocab, hidden, generator=generator).bfloat16(),
        "lm_head.weight": (torch.randn(vocab, hidden, generator=generator) / 4).bfloat16(),
        f"{mtp}.eh_proj.weight": torch.cat([eye, 0.15 * eye], dim=1).bfloat16(),
        f"{mtp}.final_layernorm.weight": tensors["model.norm.weight"].clone(),
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(4, 500, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agreeable_checkpoint(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return from_checkpoint(folder).generate(prompts(), TOKENS, frozenset())


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[dict[str, EngineRun]]:
    cases = [("plain", 0, 4), ("drafts", 3, 4), ("drafts, alone", 2, 1), ("drafts, all", 3, len(LENGTHS))]
    specs = [
        EngineSpec(
            name,
            str(folder),
            prompts(),
            max_tokens=TOKENS,
            concurrency=concurrency,
            draft_tokens=drafts,
            options={"lm_head": "bf16"},
        )
        for name, drafts, concurrency in cases
    ]
    yield {run.name: run for run in run_engines(specs)}


@pytest.mark.parametrize("name", ["plain", "drafts", "drafts, alone", "drafts, all"])
def test_tokens_equal_the_reference(name: str, runs: dict[str, EngineRun], expected: list[list[int]]) -> None:
    wrong = [
        f"prompt {i} ({LENGTHS[i]} tokens) from token {next(j for j in range(TOKENS) if pair[0][j] != pair[1][j])}"
        for i, pair in enumerate(zip(runs[name].tokens, expected, strict=True))
        if pair[0] != pair[1]
    ]
    assert not wrong, wrong


def test_drafts_are_neither_all_accepted_nor_all_rejected(runs: dict[str, EngineRun]) -> None:
    # Otherwise the runs above would not have met every accepted count.
    length = runs["drafts"].accept_length
    assert length is not None and 1.5 < length < 3.5
