# SPDX-License-Identifier: Apache-2.0
"""When a draft's best token is asked for instead of its logits."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ling.spec_decode.draft_argmax import choose_draft_argmax


def draft(**changes: Any) -> Any:
    sound = {
        "use_local_argmax_reduction": False,
        "draft_sample_method": "greedy",
        "enable_adaptive_verification": False,
    }
    return SimpleNamespace(**{**sound, **changes})


def test_greedy_drafts_on_one_gpu_need_no_logits() -> None:
    assert choose_draft_argmax(draft(), 1, True, False)[0]


@pytest.mark.parametrize(
    ("changes", "ranks", "cuda", "word"),
    [
        ({}, 1, False, "no NVIDIA GPU"),
        ({}, 2, True, "several GPUs"),
        ({"draft_sample_method": "probabilistic"}, 1, True, "probabilistic"),
        ({"enable_adaptive_verification": True}, 1, True, "adaptive"),
    ],
)
def test_otherwise_the_logits_are_kept(changes: dict[str, Any], ranks: int, cuda: bool, word: str) -> None:
    wanted, reason = choose_draft_argmax(draft(**changes), ranks, cuda, False)
    assert not wanted and word in reason


def test_the_gate_needs_probabilities() -> None:
    wanted, reason = choose_draft_argmax(draft(), 1, True, True)
    assert not wanted and "draft_gate" in reason


def test_what_the_user_asked_for_stays() -> None:
    assert choose_draft_argmax(draft(use_local_argmax_reduction=True), 2, False, False) == (
        True,
        "use_local_argmax_reduction",
    )
