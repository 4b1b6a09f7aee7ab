# SPDX-License-Identifier: Apache-2.0
"""How sure the draft was of each of its last tokens, kept on the device where the drafts are made.

A shift register: it works inside CUDA graphs, whether a graph holds one draft step or all of them, and needs no
number of the step.
"""

import torch


class DraftConfidence:
    """Probabilities of the best token of the last draft steps.

    Args:
        requests: rows, the most requests of a batch.
        steps: draft steps that are remembered.
        device: of the draft's logits.
    """

    def __init__(self, requests: int, steps: int, device: torch.device | str | None = None) -> None:
        # Newest step first.
        self._recent = torch.zeros(requests, steps, dtype=torch.float32, device=device)

    def note(self, logits: torch.Tensor) -> None:
        """One draft step: logits [requests, vocab] of its batch; larger ones are a memory profile's, and ignored."""
        rows = logits.shape[0]
        if rows > self._recent.shape[0]:
            return
        logits = logits.float()
        best = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        recent = self._recent[:rows]
        recent.copy_(torch.cat([best.unsqueeze(-1), recent[:, :-1]], dim=-1))

    def read(self, requests: int, steps: int) -> list[list[float]]:
        """[requests][steps] of the last round, oldest step first; waits for the device."""
        return self._recent[:requests, :steps].flip(-1).tolist()
