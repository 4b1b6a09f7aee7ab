# SPDX-License-Identifier: Apache-2.0
"""The fused path built of vLLM's modules: the kernels that `vllm-ling tune` builds, and who stays on vLLM's layers."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu import fused_modules
from tests.cpu.fused_modules import META, Kernels, bf16, decoder_layer, kda_attention, target, tensor
from vllm_ling.decode import fused
from vllm_ling.decode.from_vllm import Unsuitable, kda_batch
from vllm_ling.decode.fused import build_draft, build_target
from vllm_ling.decode.shapes import fused_shapes
from vllm_ling.roofline.models import model_shape

FLASH = model_shape("flash")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(fused, "Kernels", made)
    monkeypatch.setattr(fused, "_SPACES", {})
    return made


def test_flash_asks_for_what_tune_builds(kernels: Kernels) -> None:
    built = build_target(target(FLASH), META)
    assert built.most == 8 and built.entry is None
    draft = build_draft(decoder_layer(FLASH, FLASH.num_hidden_layers), META)
    assert draft.most == 8 and draft.entry is not None and draft.entry.projection.gemv.shape.k == 5120
    tuned = fused_shapes(FLASH)
    assert kernels.asked == {*tuned.gemv, tuned.kda, tuned.mla, (tuned.mla, False)}


@pytest.mark.parametrize("narrow", fused_shapes(FLASH).gemv, ids=lambda s: f"{s.prologue} {s.rows} x {s.k}")
def test_the_narrowest_kernel_limits_the_tokens(
    monkeypatch: pytest.MonkeyPatch, narrow: Any, kernels: Kernels
) -> None:
    """A small card has no room for 8 rows of the dense MLP: such a batch must not reach its kernel."""
    monkeypatch.setattr(fused, "Kernels", Kernels(lambda shape: 4 if shape == narrow else 16))
    draft = decoder_layer(FLASH, FLASH.num_hidden_layers)
    limits = {build_target(target(FLASH), META).most, build_draft(draft, META).most}
    assert min(limits) == 4


def test_experts_limit_the_tokens(kernels: Kernels) -> None:
    model = target(FLASH)
    model.model.layers[20].mlp = fused_modules.moe_block(FLASH, most=2)
    assert build_target(model, META).most == 2


def kda(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layers: layers[0].self_attn.__dict__.update({name: value})


def mla(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layers: layers[5].self_attn.__dict__.update({name: value})


def mlp(number: int, **values: Any) -> Callable[[Any], None]:
    return lambda layers: layers[number].mlp.__dict__.update(values)


POOL = kda_attention(FLASH).kv_cache
NEOX = SimpleNamespace(is_neox_style=True, cos_sin_cache=tensor(64, 64))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (kda("qkv_proj", None), "b_proj is quantized"),
        (kda("head_dim", 64), "KDA heads of 64"),
        (kda("conv_size", 3), "over 3 tokens"),
        (kda("f_proj", bf16(4096, 2560)), "KDA's in_proj is not read by our FP8 kernel"),
        (kda("o_proj", bf16(2560, 4096)), "KDA's o_proj is not read"),
        (kda("A_log", tensor(32)), "A_log is torch.bfloat16"),
        (
            kda("b_proj", SimpleNamespace(weight=tensor(2560, 32).T)),
            "b_proj is torch.bfloat16, not contiguous",
        ),
        (kda("kv_cache", (POOL[0].float(), POOL[1])), "KDA states are torch.float32 and torch.float32"),
        (kda("kv_cache", (POOL[0], POOL[1].mT)), "KDA states are laid out as"),
        (mla("q_proj", None), "q_lora_rank"),
        (mla("gated_attention_proj_granularity_type", "element_wise"), "not one number per head"),
        (mla("v_head_dim", 64), "not one number per head of 128"),
        (mla("rotary_emb", NEOX), "MLA rotates by SimpleNamespace"),
        (mla("dense", bf16(2560, 4096)), "MLA's dense is not read"),
        (mlp(0, act_fn=torch.nn.SiLU()), "a dense MLP activates by SiLU"),
        (mlp(0, down_proj=bf16(2560, 6144)), "dense down_proj is not read"),
        (mlp(2, ling_group=SimpleNamespace(usable=lambda x: False)), "our MoE kernel was not taken"),
        (lambda layers: setattr(layers[2], "mlp", torch.nn.Identity()), "experts are not read by our MoE"),
    ],
)
def test_what_the_kernels_cannot_serve_is_named(
    change: Callable[[Any], None], word: str, kernels: Kernels
) -> None:
    model = target(FLASH)
    change(model.model.layers)
    with pytest.raises(Unsuitable, match=word):
        build_target(model, META)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain(slots: torch.Tensor) -> Any:
    return SimpleNamespace(spec_sequence_masks=None, non_spec_state_indices_tensor=slots)


def verified(**changes: Any) -> Any:
    """Two sequences of up to four tokens."""
    facts = {
        "spec_sequence_masks": torch.ones(2, dtype=torch.bool),
        "spec_state_indices_tensor": torch.stack([integers(1, 2, 3, 4), integers(5, 6, 7, 8)]),
        "spec_query_start_loc": integers(0, 4, 6),
        "num_accepted_tokens": integers(2, 1),
    }
    return SimpleNamespace(**facts | changes)


def test_plain_decodes_have_one_token_each() -> None:
    batch, problem = kda_batch(plain(integers(4, 9, 0, 0)), 3)
    assert problem == "" and batch is not None
    assert batch.slots.tolist() == [4, 9, 0], (
        "as many as there are tokens: more would be written behind the output"
    )
    assert (batch.starts, batch.accepted, batch.longest) == (None, None, 1)


def test_verification_brings_slots_starts_and_acceptance() -> None:
    metadata = verified()
    batch, problem = kda_batch(metadata, 6)
    assert problem == "" and batch is not None and batch.longest == 4
    assert batch.slots is metadata.spec_state_indices_tensor
    assert batch.starts is metadata.spec_query_start_loc
    assert batch.accepted is metadata.num_accepted_tokens


def test_rows_of_a_wider_table_are_taken() -> None:
    """vLLM cuts the table of an eager batch out of the block table: its rows lie further apart."""
    wide = torch.arange(20, dtype=torch.int32).view(2, 10)[:, :4]
    batch, _ = kda_batch(verified(spec_state_indices_tensor=wide), 6)
    assert batch is not None and batch.longest == 4 and batch.slots.stride() == (10, 1)


def test_a_column_of_the_block_table_is_taken() -> None:
    """Without full graphs vLLM hands over the table's first column: the kernel is told how far entries lie apart."""
    batch, _ = kda_batch(plain(integers(*range(8)).view(2, 4)[:, 0]), 2)
    assert batch is not None and batch.slots.tolist() == [0, 4] and batch.slots.stride() == (4,)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        (plain(torch.tensor([1, 2])), "torch.int64"),
        (verified(spec_query_start_loc=torch.tensor([0, 4, 6])), "torch.int64"),
        (verified(num_accepted_tokens=torch.tensor([2, 1])), "torch.int64"),
        (verified(num_accepted_tokens=integers(2, 0, 1, 0)[::2]), r"strides \(2,\)"),
        (verified(spec_state_indices_tensor=integers(*range(8)).view(4, 2).T), r"strides \(1, 2\)"),
    ],
)
def test_indices_that_the_kernel_would_misread_are_refused(metadata: Any, word: str) -> None:
    batch, problem = kda_batch(metadata, 2)
    assert batch is None
    assert re.search(f"an index of the batch is .*{word}", problem)
