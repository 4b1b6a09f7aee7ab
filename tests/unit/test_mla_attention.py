# SPDX-License-Identifier: Apache-2.0
"""The latent attention's fp32 reference against attention over expanded keys and values; which weights it accepts."""

import dataclasses

import pytest
import torch

from vllm_ling.decode.mla_attention import LatentWeights, MlaBatch, weights_problem
from vllm_ling.decode.mla_prepare import MlaInputs
from vllm_ling.decode.reference import mla_attention_reference

HEADS, NOPE, LATENT = 4, 128, 128


def weights(contiguous: bool) -> LatentWeights:
    """As vLLM cuts them out of one matrix, which lies either way."""
    torch.manual_seed(0)
    if contiguous:
        joined = torch.randn(HEADS, NOPE + 128, LATENT, dtype=torch.bfloat16)
        key, value = joined.split([NOPE, 128], 1)
        return LatentWeights(key, value.transpose(1, 2))
    joined = torch.randn(LATENT, HEADS, NOPE + 128, dtype=torch.bfloat16)
    key, value = joined.split([NOPE, 128], 2)
    return LatentWeights(key.permute(1, 2, 0), value.transpose(0, 1))


@pytest.mark.parametrize("contiguous", [False, True])
def test_both_layouts_are_accepted_and_told_apart(contiguous: bool) -> None:
    found = weights(contiguous)
    assert found.latent_contiguous is contiguous and weights_problem(found) is None


def test_other_projections_have_a_reason() -> None:
    sound = weights(True)
    assert "not BF16" in (weights_problem(LatentWeights(sound.key.float(), sound.value)) or "")
    assert "64 values" in (weights_problem(LatentWeights(sound.key, sound.value[..., :64])) or "")
    mixed = LatentWeights(sound.key, weights(False).value)
    assert "laid out" in (weights_problem(mixed) or "")
    odd = torch.randn(HEADS, NOPE, LATENT + 4, dtype=torch.bfloat16)[..., :LATENT]
    assert "laid out" in (weights_problem(dataclasses.replace(sound, key=odd)) or "")


@pytest.mark.parametrize("contiguous", [False, True])
def test_the_reference_is_attention_over_expanded_keys_and_values(contiguous: bool) -> None:
    """Two sequences, one verifying three tokens, and a padded token; blocks in any order."""
    latent, size = weights(contiguous), 8
    lengths, counts = [21, 5], [3, 1]
    tokens = sum(counts) + 1
    made = MlaInputs(
        torch.randn(tokens, HEADS, NOPE + 64),
        torch.randn(tokens, LATENT),
        torch.randn(tokens, 1, 64),
        torch.rand(tokens, HEADS),
    )
    cache = torch.randn(8, size, LATENT + 64).bfloat16()
    blocks = torch.tensor([[5, 2, 7], [3, 0, 0]], dtype=torch.int32)
    slots = [int(blocks[0][n // size]) * size + n % size for n in (18, 19, 20)] + [3 * size + 4, -1]
    batch = MlaBatch(
        cache,
        torch.tensor(slots),
        blocks,
        torch.tensor([0, 3, 4], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
    )
    found = mla_attention_reference(made, latent, batch, 0.1)
    assert torch.equal(cache[7, 4, :LATENT], made.latent[2].bfloat16())
    assert not found[-1].any()
    for token, (row, seen) in enumerate([(0, 19), (0, 20), (0, 21), (1, 5)]):
        rows = torch.stack([cache[blocks[row][n // size].item(), n % size] for n in range(seen)]).float()
        keys = torch.einsum("kl,hpl->khp", rows[:, :LATENT], latent.key.float())
        keys = torch.cat([keys, rows[:, None, LATENT:].expand(-1, HEADS, -1)], -1)
        values = torch.einsum("kl,hlv->khv", rows[:, :LATENT], latent.value.float())
        share = (torch.einsum("hd,khd->hk", made.query[token], keys) * 0.1).softmax(-1)
        exact = torch.einsum("hk,khv->hv", share, values).flatten()
        torch.testing.assert_close(found[token], exact, rtol=1e-4, atol=1e-3)
