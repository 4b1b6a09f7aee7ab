# SPDX-License-Identifier: Apache-2.0
"""Do the head's decode kernels give what its loaded FP8 weights say? Asked whenever the head's weights are settled."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vllm_ling.quant.linear_check import EXACT_BOUND, furthest, random_tokens
from vllm_ling.status import fault, proof

# The two kernels may add in another order, so a logit may be rounded to the BF16 next to the other kernel's.
_STEP = 2.0**-7


def logits_problem(
    code: str,
    logits: Callable[[Tensor], Tensor],
    most: int,
    weight: Tensor,
    parts: Iterable[slice],
    exact: Callable[[slice], Tensor],
) -> str:
    """Why the kernel `logits` cannot be used, or "": how far it is from an fp32 product goes on record as `code`.

    Args:
        code: of the proof or fault.
        logits: BF16 [tokens, hidden] -> BF16 [tokens, rows].
        most: tokens that it takes.
        weight: E4M3 [rows, hidden].
        parts: its rows, in parts that are multiplied one after another, so that no second copy of it exists.
        exact: those rows with their scales, float32 [rows of a part, hidden].
    """
    try:
        counts, x = _trial(most, weight)
        found = {count: logits(x[:count]) for count in counts}
        distances, seen = [], []
        for part in parts:
            right = x.float() @ exact(part).T
            seen.append(right.any())
            distances += [furthest(ours[:, part], right[:count]) for count, ours in found.items()]
        if not bool(torch.stack(seen).any()):
            raise ValueError("it is zero")
        away = float(torch.stack(distances).max())
    except Exception as error:  # without evidence the head goes on without our kernel
        return f"not compared with an fp32 product: {type(error).__name__}: {error}"
    said = f"{away:.4f} (relative RMS of 128 rows) from an fp32 product of the loaded weights"
    if not away <= EXACT_BOUND:
        fault(code, f"our kernel is {said}")
        return f"it is {said}"
    proof(code, f"our kernel is at most {said}, {len(counts)} token counts")
    return ""


def argmax_problem(
    code: str,
    best: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    most: int,
    weight: Tensor,
    rows: int,
) -> str:
    """Why the kernel `best` cannot be used, or "": whether its rows have the largest logits goes on record as `code`.

    Args:
        code: of the proof or fault.
        best: BF16 [tokens, hidden], int64 [tokens] that receives rows below `rows` -> the latter; any row with the
            largest logit will do.
        logits: BF16 [tokens, hidden] -> BF16 [tokens, at least `rows`], compared with the weights before.
        most: tokens that both take.
        weight: E4M3 [at least `rows`, hidden].
        rows: of the vocabulary without padding.
    """
    try:
        counts, x = _trial(most, weight)
        wrong = []
        for count in counts:
            nothing = torch.full((count,), -1, dtype=torch.int64, device=x.device)
            found, right = best(x[:count], nothing), logits(x[:count])[:, :rows].float()
            top = right.max(-1).values
            value = right.gather(-1, found.clamp(0, rows - 1)[:, None])[:, 0]
            wrong.append((found < 0) | (found >= rows) | ~(value >= top - _STEP * top.abs()))
        missed, tokens = int(torch.cat(wrong).sum()), sum(counts)
    except Exception as error:  # without evidence the logits are computed instead
        return f"not compared with the logits: {type(error).__name__}: {error}"
    if missed:
        said = f"misses the largest logit of {missed} of {tokens} random tokens"
        fault(code, f"our argmax kernel {said}")
        return f"it {said}"
    proof(
        code,
        f"our argmax kernel finds the largest logit of {tokens} random tokens, {len(counts)} token counts",
    )
    return ""


def _trial(most: int, weight: Tensor) -> tuple[list[int], Tensor]:
    """The numbers of tokens up to `most` that kernels are compiled for, and as many random tokens as the largest."""
    from vllm_ling.quant.fp8_gemv import TOKEN_COUNTS

    counts = [count for count in TOKEN_COUNTS if count <= most]
    return counts, random_tokens(counts[-1], weight.shape[1], weight.device)
