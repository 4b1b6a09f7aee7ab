# SPDX-License-Identifier: Apache-2.0
"""Weights for comparing engines: a function of names, of sensible size, with a decisive router and a known answer."""

import json
from pathlib import Path

import pytest
import torch

from vllm_ling.checkpoint.validate import validate_checkpoint
from vllm_ling.eval.studies.exact import exact_states
from vllm_ling.eval.studies.seeded_engine import seeded_folder
from vllm_ling.eval.studies.seeded_weights import LANES, SeededWeights, continuation, draftable, successor
from vllm_ling.eval.studies.workloads import LENGTHS, stale_texts, texts
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.moe import Router

VOCABULARY = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeded_folder(tmp_path_factory.mktemp("seeded"), "mini", 6)


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def test_headers_pass_the_check_of_a_checkpoint_and_take_no_space(folder: Path) -> None:
    validate_checkpoint(folder)
    file = (folder / "model.safetensors").stat()
    assert file.st_blocks * 512 < 200_000 < file.st_size


def test_values_do_not_depend_on_what_else_is_made(config: dict[str, object]) -> None:
    every = dict(SeededWeights(config, "cpu").tensors())
    fresh = SeededWeights(config, "cpu")
    assert torch.equal(
        fresh.stored("model.layers.3.mlp.gate.weight"), every["model.layers.3.mlp.gate.weight"]
    )
    codes, scales = fresh.experts("model.layers.2.mlp.experts", "down_proj")
    assert torch.equal(codes[7], every["model.layers.2.mlp.experts.7.down_proj.weight"])
    assert torch.equal(scales[7], every["model.layers.2.mlp.experts.7.down_proj.weight_scale_inv"])
    other = every["model.layers.3.mlp.experts.7.down_proj.weight"]
    assert not torch.equal(codes[7], other)


def test_values_do_not_depend_on_the_default_dtype(config: dict[str, object]) -> None:
    """vLLM loads with the model's dtype as torch's default."""
    plain = dict(SeededWeights(config, "cpu").tensors())
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = SeededWeights(config, "cpu")
        wrong = [
            name
            for name, tensor in other.tensors()
            if not torch.equal(*(_bytes(t) for t in (tensor, plain[name])))
        ]
        assert wrong == [] and other.value("lm_head.weight").dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_target_and_draft_together_hold_every_tensor_once(config: dict[str, object]) -> None:
    weights = SeededWeights(config, "cpu")
    target, draft = ([name for name, _ in weights.tensors(draft)] for draft in (False, True))
    both = set(target) & set(draft)
    assert both == {"model.word_embeddings.weight", "lm_head.weight", "model.norm.weight"}
    assert len(target) == len(set(target)) and set(target) | set(draft) == set(weights.specs)
    for name, tensor in weights.tensors(draft=True):
        assert tuple(tensor.shape) == weights.specs[name].shape, name


@pytest.mark.parametrize("vocabulary", [512, 157184])
def test_a_lane_is_never_left_and_no_token_returns_early(vocabulary: int) -> None:
    answer = continuation(13, vocabulary // LANES, vocabulary)
    assert {token % LANES for token in answer} == {13 % LANES}
    assert len(set(answer)) == len(answer) and answer[-1] == 13


def test_drafts_are_found_for_most_tokens_in_no_regular_order() -> None:
    found = draftable(torch.tensor(continuation(3, 5000, 157184)))
    assert 0.6 < float(found.float().mean()) < 0.8
    # After a miss as after a hit.
    assert 0.6 < float(found[1:][~found[:-1]].float().mean()) < 0.8


def test_the_reference_finds_the_known_answer_and_depends_on_the_prompt(config: dict[str, object]) -> None:
    right, stale = texts(VOCABULARY), stale_texts(VOCABULARY)
    weights = SeededWeights(config, "cpu")
    lanes = (0, 1)
    asked = [right[0], right[1], stale[0], stale[1]]
    found = exact_states(config, weights, asked, (2, 5), [LENGTHS[lane] for lane in (*lanes, *lanes)])
    for lane in lanes:
        fed = right[lane][LENGTHS[lane] :]
        logits = found[lane]["logits"]
        assert logits.argmax(-1).tolist() == [successor(token, VOCABULARY) for token in fed]
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 2
        for tap in ("2", "5", "final"):
            state, other = (found[n][tap][LENGTHS[lane] :] for n in (lane, lane + 2))
            assert 0.5 < float(state.square().mean().sqrt()) < 5
            assert float(((state - other).square().mean() / state.square().mean()).sqrt()) > 0.05


def test_routing_survives_a_rounding_error(config: dict[str, object]) -> None:
    weights = SeededWeights(config, "cpu")
    router = Router(ReferenceConfig.from_dict(config))
    with torch.no_grad():
        router.weight.copy_(weights.value("model.layers.4.mlp.gate.weight"))
        router.expert_bias.copy_(weights.value("model.layers.4.mlp.gate.expert_bias"))
    x = weights.value("model.word_embeddings.weight")
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

    def same() -> float:
        return float((router(x).bool() == router(x + 0.1 * noise).bool()).all(-1).float().mean())

    assert same() > 0.98 and len(router(x).bool().unique(dim=0)) > 2
    with torch.no_grad():  # the control: rows without structure
        router.weight.normal_(generator=torch.Generator().manual_seed(1)).div_(16)
    assert same() < 0.8
