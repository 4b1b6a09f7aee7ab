# SPDX-License-Identifier: Apache-2.0
"""Layers and batches that MLA attention is tested on, on a GPU and in the emulator."""

import dataclasses

import torch

from vllm_ling.decode.mla_attention import LatentWeights, MlaAttention, MlaBatch
from vllm_ling.decode.mla_prepare import MlaShape, MlaWeights
from vllm_ling.decode.reference import mla_attention_reference, mla_prepare_reference


@dataclasses.dataclass
class Case:
    """A layer and a batch of sequences, by (keys, tokens of this step); what no token may read is NaN."""

    shape: MlaShape
    contiguous: bool
    sequences: list[tuple[int, int]]
    padding: int = 0
    block_size: int = 48
    device: str = "cuda"

    def __post_init__(self) -> None:
        s, tokens = self.shape, sum(count for _, count in self.sequences) + self.padding
        self.tokens = tokens
        self.weights = MlaWeights(
            latent_norm=(1 + self.normal(s.latent, scale=0.1)).bfloat16(),
            gate=self.normal(s.heads, s.hidden, scale=0.05).bfloat16(),
            cos_sin=self.normal(4096, 64).clamp(-1, 1).bfloat16(),
            eps=1e-6,
        )
        self.projected = self.normal(tokens, sum(s.projected)).bfloat16()
        self.normed = self.normal(tokens, s.hidden).bfloat16()
        self.positions = torch.randint(0, 4096, (tokens,), device=self.device)
        # Both projections as vLLM cuts them out of one matrix.
        if self.contiguous:
            joined = self.normal(s.heads, s.nope + 128, s.latent, scale=s.latent**-0.5).bfloat16()
            key, value = joined.split([s.nope, 128], 1)
            self.latent = LatentWeights(key, value.transpose(1, 2))
        else:
            joined = self.normal(s.latent, s.heads, s.nope + 128, scale=s.latent**-0.5).bfloat16()
            key, value = joined.split([s.nope, 128], 2)
            self.latent = LatentWeights(key.permute(1, 2, 0), value.transpose(0, 1))
        self.scale = (s.nope + s.rope) ** -0.5
        size, most = self.block_size, max(-(-length // self.block_size) for length, _ in self.sequences)
        blocks = torch.randperm(most * len(self.sequences), device=self.device).int() + 1
        table = blocks.view(len(self.sequences), most)
        # Blocks lie further apart than they are long, and what no sequence reads is NaN.
        cache = torch.full(
            (1 + len(blocks), size + 3, s.latent + 64), torch.nan, device=self.device
        ).bfloat16()[:, :size]
        starts, slots = [0], []
        for row, (length, count) in zip(table, self.sequences, strict=True):
            for key_number in range(length - count):
                cache[row[key_number // size], key_number % size] = self.normal(s.latent + 64).bfloat16()
            slots += [int(row[n // size]) * size + n % size for n in range(length - count, length)]
            starts.append(starts[-1] + count)
        integers = {"dtype": torch.int32, "device": self.device}
        self.batch = MlaBatch(
            cache,
            torch.tensor(slots + [-1] * self.padding, dtype=torch.int64, device=self.device),
            table,
            torch.tensor(starts, **integers),  # type: ignore[arg-type]
            torch.tensor([length for length, _ in self.sequences], **integers),  # type: ignore[arg-type]
        )

    def normal(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=torch.float32) * scale

    def copy(self) -> MlaBatch:
        kept = torch.empty_strided(
            self.batch.cache.shape, self.batch.cache.stride(), dtype=torch.bfloat16, device=self.device
        )
        return dataclasses.replace(self.batch, cache=kept.copy_(self.batch.cache))

    def exact(
        self, batch: MlaBatch, latent: LatentWeights | None = None, **changes: torch.Tensor
    ) -> torch.Tensor:
        """The reference's output, with `latent` or other inputs in the place of the case's; writes `batch.cache`."""
        given = {"projected": self.projected, "normed": self.normed, "positions": self.positions, **changes}
        made = mla_prepare_reference(self.shape, w=self.weights, **given)
        return mla_attention_reference(made, latent or self.latent, batch, self.scale)

    def run(self, kernel: MlaAttention, batch: MlaBatch, gate: torch.Tensor, out: torch.Tensor) -> None:
        kernel(
            *(self.projected, self.normed, self.positions, self.weights, self.latent, batch, self.scale),
            *(gate, out),
        )

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.full((self.tokens, self.shape.heads), torch.nan, device=self.device, dtype=torch.float32),
            torch.full((self.tokens, self.shape.heads * 128), torch.nan, device=self.device).bfloat16(),
        )
