# SPDX-License-Identifier: Apache-2.0
"""tiny-ling's tokenizer and chat template: lossless, digit by digit, reproducible, Ling's role format."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from vllm_ling.tiny.assets import MODEL_DIR, build_assets
from vllm_ling.tiny.tokenizer import EOS, PAD, SPECIAL_TOKENS, VOCAB_SIZE, render_chat

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@given(st.text())
def test_any_text_survives(text: str) -> None:
    encoding = TOKENIZER.encode(text)
    assert TOKENIZER.decode(encoding.ids, skip_special_tokens=False) == text
    assert all(i < VOCAB_SIZE for i in encoding.ids)


@given(st.integers(min_value=0))
def test_digits_are_single_tokens(number: int) -> None:
    assert TOKENIZER.encode(str(number)).tokens == list(str(number))


def test_special_tokens_are_single_and_in_range() -> None:
    assert TOKENIZER.get_vocab_size() <= VOCAB_SIZE and VOCAB_SIZE % 64 == 0
    for token in SPECIAL_TOKENS:
        assert TOKENIZER.encode(f"a{token}b").tokens == ["a", token, "b"]


def test_assets_are_deterministic_and_shipped(tmp_path: Path) -> None:
    build_assets(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (MODEL_DIR / name).read_bytes(), name
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [TOKENIZER.token_to_id(EOS), TOKENIZER.token_to_id(PAD)]
    assert "temperature" not in generation
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == TOKENIZER.token_to_id(EOS)
    assert config["vocab_size"] == VOCAB_SIZE and config["model_type"] == "bailing_hybrid"


@pytest.fixture(scope="module")
def chat():
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)


def test_chat_template_text(chat) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "What is 2+2?"},
    ]
    assert chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<role>SYSTEM</role>Be brief.<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>Yes?<|role_end|><role>HUMAN</role>What is 2+2?<|role_end|>"
        "<role>ASSISTANT</role>"
    )


def test_training_text_is_the_chat_template(chat) -> None:
    user, assistant = {"role": "user", "content": "Q 1"}, {"role": "assistant", "content": "#### 1"}
    asked = chat.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert asked == render_chat("Q 1")
    assert chat.apply_chat_template([user, assistant], tokenize=False) == render_chat("Q 1", "#### 1")
    assert chat(asked)["input_ids"] == TOKENIZER.encode(asked).ids
    assert chat.eos_token == EOS and chat.pad_token == PAD
