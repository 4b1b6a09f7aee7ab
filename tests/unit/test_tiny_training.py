# SPDX-License-Identifier: Apache-2.0
"""Training tiny-ling: corpus, quantization-aware weights, a few CPU steps with resume, evaluation."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.unit.reference_models import small_model
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.save import official_state_dict
from vllm_ling.tiny.assets import MODEL_DIR
from vllm_ling.tiny.corpus import GIVEN, PADDING, PRODUCED, ROW_LENGTH, build_corpus
from vllm_ling.tiny.evaluate import clamp_effect, load_heldout, score

pytest.importorskip("vllm_ling.quant.mxfp4")

from vllm_ling.eval.studies.train_tiny import main
from vllm_ling.tiny.objective import balance_experts, quantized_weights

TOKENIZER_FILE = MODEL_DIR / "tokenizer.json"


def _marked(row: torch.Tensor, kinds: torch.Tensor, kind: int) -> str:
    ids = row[kinds == kind].tolist()
    return str(Tokenizer.from_file(str(TOKENIZER_FILE)).decode(ids, skip_special_tokens=False))


def test_corpus_rows_and_marks() -> None:
    tokens, kinds = build_corpus(TOKENIZER_FILE, 200, seed=3, workers=1)
    assert tokens.shape == kinds.shape == (200, ROW_LENGTH)
    problems = drills = 0
    for row, kind in zip(tokens, kinds, strict=True):
        given, produced = _marked(row, kind, GIVEN), _marked(row, kind, PRODUCED)
        if given.startswith("<role>HUMAN</role>"):
            problems += 1
            assert given.endswith("<role>ASSISTANT</role>")
            assert "#### " in produced and produced.endswith("<|role_end|>")
        else:
            drills += 1
            assert set(given) <= set("0123456789+-*/=") and set(produced) <= set("0123456789\n")
        assert set(_marked(row, kind, PADDING).split("<|endoftext|>")) == {""}
    assert problems + drills == 200 and 30 <= drills <= 70


def test_corpus_does_not_depend_on_workers() -> None:
    alone = build_corpus(TOKENIZER_FILE, 40, seed=3, workers=1)
    shared = build_corpus(TOKENIZER_FILE, 40, seed=3, workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert not torch.equal(alone[0], build_corpus(TOKENIZER_FILE, 40, seed=4, workers=1)[0])


def test_quantized_weights_pass_gradients_and_leave_the_rest() -> None:
    model = small_model(num_attention_heads=2)
    weights = dict(quantized_weights(model))
    assert len([n for n in weights if ".experts." in n]) == 5 * 3
    untouched = "lm_head .b_proj word_embeddings .gate.weight norm conv1d A_log 1.attention.g_proj"
    for name in untouched.split():
        assert not [n for n in weights if name in n], name
    rounded = "0.attention.g_proj eh_proj kv_a_proj_with_mqa kv_b_proj shared_experts.up_proj 0.mlp.down_proj"
    for name in rounded.split():
        assert [n for n in weights if name in n], name
    name = "model.layers.1.mlp.experts.up_proj"
    parameter = dict(model.named_parameters())[name]
    assert (weights[name] - parameter).abs().max() > 1e-3
    weights[name].sum().backward()
    torch.testing.assert_close(parameter.grad, torch.ones_like(parameter))


def test_balancing_moves_bias_towards_idle_experts() -> None:
    model = small_model().train()
    _, moe = next(model.moe_layers())
    before = moe.gate.expert_bias.clone()
    moe.load = torch.tensor([8.0, 0, 4, 4, 4, 4, 4, 4])
    balance_experts(model, 0.5)
    torch.testing.assert_close(moe.gate.expert_bias - before, torch.tensor([-0.5, 0.5, 0, 0, 0, 0, 0, 0]))
    assert moe.load is None


def _options(out: Path, *more: str) -> list[str]:
    fixed = ["--batch", "4", "--rows", "64", "--workers", "1", "--device", "cpu", "--precision", "fp32"]
    return ["--out", str(out), *fixed, "--minutes", "60", "--eval-items", "4", "--log-every", "1", *more]


def test_training_learns_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "kept.pt"

    class Interrupted(Exception):
        pass

    from vllm_ling.eval.studies import train_tiny

    trainer = train_tiny.Trainer(train_tiny.parse(_options(tmp_path, "--steps", "8", "--state", str(state))))
    original = trainer.step

    def stop_after_five(tokens: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if trainer.progress.step == 5:
            trainer.save()
            raise Interrupted
        return original(tokens, kinds)

    trainer.step = stop_after_five  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        trainer.train()
    assert state.exists() and (tmp_path / "config.json").exists()

    main(_options(tmp_path, "--steps", "8", "--state", str(state), "--resume"))
    assert "resumed at step 5" in capsys.readouterr().out
    report = json.loads((tmp_path / "train_report.json").read_text())
    assert report["steps"] == 8 and report["device"] == "cpu"
    losses = [row["loss"] for row in report["history"]]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    assert 1.0 <= report["bf16"]["accept_length"] <= 4.0

    model = from_checkpoint(tmp_path)
    assert len(official_state_dict(model)) == len(official_state_dict(trainer.model))
    items = load_heldout(2)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert score(model, tokenizer, items, 3).items == 2
    assert clamp_effect(model, tokenizer, items).positions > 50
