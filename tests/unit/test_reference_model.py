# SPDX-License-Identifier: Apache-2.0
"""The reference model is one function, however it is called, and its negative controls change it."""

from typing import Any

import pytest
import torch

from tests.unit.reference_models import small_config, small_model
from vllm_ling.errors import LingError
from vllm_ling.reference.cache import Cache
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.layers import rotate, swiglu
from vllm_ling.reference.speculate import Speculation, speculate

SHAPES: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": 24, "num_nextn_predict_layers": 0},
    {"gated_attention_proj_granularity_type": "element_wise"},
    {"gated_attention_proj_granularity_type": None},
]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 37), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_cached_decode_equals_full_forward(tokens: torch.Tensor, shape: dict[str, Any]) -> None:
    model = small_model(**shape)
    full = model(tokens)
    cache = Cache()
    parts = [model(tokens[:, :20], cache)] + [model(tokens[:, i : i + 1], cache) for i in range(20, 37)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_parallel_forms_and_padding_change_nothing(tokens: torch.Tensor) -> None:
    model = small_model()
    plain = model(tokens)
    torch.testing.assert_close(model.set_parallel()(tokens), plain, atol=1e-3, rtol=1e-3)
    padded = torch.cat([torch.full((2, 5), 9), tokens], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).expand(2, -1)
    torch.testing.assert_close(model(padded, mask=mask)[:, 5:], plain, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_negative_controls_change_the_logits(tokens: torch.Tensor) -> None:
    plain = small_model()(tokens)
    assert (small_model(ignore_clamps=True)(tokens) - plain).abs().max() > 0.1
    busy = max(range(8), key=lambda e: float((small_model(drop_expert=(2, e))(tokens) - plain).abs().mean()))
    assert (small_model(drop_expert=(2, busy))(tokens) - plain).abs().max() > 0.1


@torch.inference_mode()
def test_router_choice_by_hand() -> None:
    """Bias moves the choice, never the weight; only experts of the best groups are eligible."""
    router = small_model().moe_layers().__next__()[1].gate
    router.weight.copy_(torch.eye(8, 64))
    router.expert_bias.copy_(torch.tensor([0, 0, 0.9, 0.9, 0, 0, 0, 0]))
    logits = torch.tensor([[2.0, 2.0, 0.0, 0.1, 3.0, -9.0, -9.0, -9.0]])
    weights = router(torch.cat([logits, torch.zeros(1, 56)], dim=1))[0]
    # Group scores: {0,1} 1.76, {2,3} 2.82, {4,5} 0.95: expert 4 is out although its own score beats 0 and 1.
    assert weights.nonzero().flatten().tolist() == [2, 3]
    scores = logits[0].sigmoid()
    torch.testing.assert_close(weights[2], 2.5 * scores[2] / (scores[2] + scores[3]))


def test_swiglu_clamps_after_silu() -> None:
    gate, up = torch.tensor([10.0, -3.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    silu = gate * gate.sigmoid()
    torch.testing.assert_close(
        swiglu(gate, up, 4.0), torch.stack([silu[0] * 0 + 16, silu[1] * -4, silu[2] * 0.5])
    )
    torch.testing.assert_close(swiglu(gate, up, None), silu * up)


def test_rotary_is_interleaved_and_relative() -> None:
    x = torch.randn(1, 1, 1, 8)
    turned = rotate(x, torch.tensor([[1]]), 1e4)
    expected = x[..., 0] * torch.cos(torch.tensor(1.0)) - x[..., 1] * torch.sin(torch.tensor(1.0))
    torch.testing.assert_close(turned[..., 0], expected)
    y = torch.randn(1, 1, 1, 8)
    dots = [
        (rotate(x, torch.tensor([[p]]), 1e4) * rotate(y, torch.tensor([[p + 3]]), 1e4)).sum() for p in (0, 40)
    ]
    torch.testing.assert_close(dots[0], dots[1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_batched_generation_equals_single(tokens: torch.Tensor) -> None:
    model = small_model()
    prompts = [tokens[0, :9].tolist(), tokens[1, :14].tolist()]
    batched = model.generate(prompts, 12, frozenset({3}))
    assert batched == [model.generate([p], 12, frozenset({3}))[0] for p in prompts]


@torch.inference_mode()
def test_rollout_equals_a_sequential_proposer(tokens: torch.Tensor) -> None:
    """Drafting as a server does, position by position with a key cache, gives the same hidden states."""
    model = small_model()
    text = tokens[:1, :12]
    hidden = model.hidden(text)
    rollout = model.mtp_rollout(text, hidden, 3)
    slot = 6
    prefix = model.mtp_rollout(text[:, : slot + 2], hidden[:, : slot + 2], 1)[0][:, slot]
    torch.testing.assert_close(rollout[0][:, slot], prefix, atol=1e-4, rtol=1e-4)

    layer = model.model.layers[5]
    embedded = model.model.word_embeddings(text)
    keys, values = [], []
    previous = hidden
    for position in range(slot + 3):
        drafted = position > slot
        source = previous[:, -1:] if drafted else hidden[:, position : position + 1]
        x = layer.mix(embedded[:, position + 1 : position + 2], source)
        normed = layer.input_layernorm(x)
        q, k, v = layer.attention.project(normed, torch.tensor([[position]]))
        keys.append(k)
        values.append(v)
        weights = torch.einsum("bthk,bshk->bhts", q, torch.cat(keys, 1)).softmax(-1)
        attended = torch.einsum("bhts,bshv->bthv", weights, torch.cat(values, 1))
        x = x + layer.attention.output(attended, normed)
        previous = layer.final_layernorm(x + layer.feed_forward(x, None))
        if position >= slot:
            torch.testing.assert_close(
                rollout[position - slot][:, slot], previous[:, 0], atol=1e-4, rtol=1e-4
            )


@torch.inference_mode()
def test_speculation_replays_a_draft_and_verify_loop(tokens: torch.Tensor) -> None:
    model = small_model(vocab_size=3)
    prompts = [(tokens[0, :9] % 3).tolist(), (tokens[1, :14] % 3).tolist()]
    outputs = model.generate(prompts, 30, frozenset())
    replay = speculate(model, prompts, outputs, 3)
    rounds = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text, end = prompt + output[:1], len(prompt) + len(output)
        while len(text) < end:
            rounds += 1
            drafts: list[int] = []
            for step in range(3):
                known = torch.tensor([text + drafts])
                padded = torch.cat([known, torch.zeros(1, 1, dtype=torch.long)], dim=1)
                states = model.mtp_rollout(padded, model.hidden(padded), step + 1)[step]
                drafts.append(int(model.logits(states)[0, len(text) - 2].argmax()))
            true = (prompt + output)[len(text) : len(text) + 4]
            hits = next((i for i, d in enumerate(drafts) if i >= len(true) or d != true[i]), 3)
            text += true[: hits + 1]
    assert replay.rounds == rounds
    assert replay.tokens == sum(len(o) - 1 for o in outputs)
    assert 1.0 < replay.accept_length <= 4.0


def test_accept_length_without_rounds_is_one() -> None:
    assert Speculation(0, 0, 0).accept_length == 1.0


def test_layer_kinds() -> None:
    config = ReferenceConfig.from_dict(small_config())
    assert [config.is_kda(i) for i in range(5)] == [True, False, True, False, False]
    assert [config.is_moe(i) for i in range(6)] == [False] + [True] * 5
    assert config.limit(3, shared=False) == 0.5 and config.limit(1, shared=True) is None
    assert config.limit(5, shared=True) is None, "MTP layers are never clamped"


@pytest.mark.parametrize(
    ("key", "value"), [("kda_safe_gate", False), ("tie_word_embeddings", True), ("kv_lora_rank", None)]
)
def test_unsupported_configs_are_named(key: str, value: Any) -> None:
    with pytest.raises(LingError, match=key):
        ReferenceConfig.from_dict(small_config() | {key: value})
