# SPDX-License-Identifier: Apache-2.0
"""Compares the BF16 head with its FP8 version while the BF16 rows stream past, so that neither is held twice.

Bounds. Rounding to e4m3 (3 mantissa bits) leaves a relative RMS error of (1/8)/sqrt(12)/1.53 = 2.4% in a weight, hence
in a logit of a random direction. The two best of N logits lie 1/sqrt(2 ln N) standard deviations apart on average,
which puts the expected top-1 agreement at 93% for N = 157,184. The bounds leave five standard errors of 256 vectors
below that; a missing, shifted or transposed scale misses the RMS bound by an order of magnitude.
"""

from dataclasses import dataclass

import torch

MAX_RMS = 0.04
MIN_TOP1 = 0.85
MAX_KL = 0.05
_SEED = 20260901


@dataclass(frozen=True)
class ProbeResult:
    """Agreement of two heads over the probe vectors."""

    top1: float
    mean_kl: float
    rms: float

    @property
    def ok(self) -> bool:
        """True inside the stated bounds; NaN anywhere is outside."""
        return self.top1 >= MIN_TOP1 and self.mean_kl <= MAX_KL and self.rms <= MAX_RMS

    def __str__(self) -> str:
        return (
            f"top-1 agreement {self.top1:.1%} (bound {MIN_TOP1:.0%}), "
            f"mean KL {self.mean_kl:.2e} nats (bound {MAX_KL}), "
            f"relative RMS error {self.rms:.2%} (bound {MAX_RMS:.0%})"
        )


class HeadProbe:
    """Streaming comparison of hidden states through two heads, row chunk by row chunk.

    Args:
        vectors: how many random ones of unit RMS are drawn.
        states: real ones to take instead, [vectors, hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        device: torch.device,
        vectors: int = 256,
        states: torch.Tensor | None = None,
    ) -> None:
        if states is None:
            generator = torch.Generator().manual_seed(_SEED)
            hidden = torch.randn(vectors, hidden_size, generator=generator, dtype=torch.float32)
            states = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
        self._hidden = states.to(device)
        vectors = len(states)
        self._best = torch.full((2, vectors), -torch.inf, device=device, dtype=torch.float32)
        self._argmax = torch.zeros(2, vectors, dtype=torch.long, device=device)
        self._sum = torch.zeros(2, vectors, device=device, dtype=torch.float32)
        self._cross = torch.zeros(vectors, device=device, dtype=torch.float32)
        self._squares = torch.zeros(2, device=device, dtype=torch.float64)
        self._rows = 0

    def update(self, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Adds rows: `reference` and `candidate` are float32 [rows, hidden], same rows in both."""
        logits = torch.stack([self._hidden @ reference.T, self._hidden @ candidate.T])
        best, index = logits.max(-1)
        self._argmax = torch.where(best > self._best, index + self._rows, self._argmax)
        new_best = torch.maximum(best, self._best)
        shrink = (self._best - new_best).exp()
        weights = (logits - new_best[..., None]).exp()
        difference = logits[0] - logits[1]
        self._sum = self._sum * shrink + weights.sum(-1)
        self._cross = self._cross * shrink[0] + (weights[0] * difference).sum(-1)
        self._best = new_best
        self._squares += torch.stack([logits[0].square().sum(), difference.square().sum()])
        self._rows += reference.shape[0]

    def result(self) -> ProbeResult:
        """KL(reference || candidate), top-1 agreement and relative RMS error over everything added."""
        log_normalizer = self._best + self._sum.log()
        kl = self._cross / self._sum[0] - (log_normalizer[0] - log_normalizer[1])
        top1 = (self._argmax[0] == self._argmax[1]).float().mean()
        rms = (self._squares[1] / self._squares[0]).sqrt()
        return ProbeResult(float(top1), float(kl.clamp_min(0).mean()), float(rms))
