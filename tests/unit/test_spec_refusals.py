# SPDX-License-Identifier: Apache-2.0
"""Speculation settings that would be ignored are refused; everything else passes."""

from dataclasses import replace

import pytest

from vllm_ling.errors import LingError
from vllm_ling.spec_decode.refusals import DraftFacts, refuse

SOUND = DraftFacts(method="mtp", quantization="ling", target_quantization="ling", mtp_layers=1)


@pytest.mark.parametrize(
    "facts",
    [
        SOUND,
        replace(SOUND, quantization=None),
        replace(SOUND, quantization=None, target_quantization=None),
        replace(SOUND, method=None, quantization="fp8", mtp_layers=0),
        replace(SOUND, method="ngram", quantization="fp8", mtp_layers=0),
        replace(SOUND, draft_vocab=True),
        replace(SOUND, tensor_parallel=2),
    ],
)
def test_sound_settings_pass(facts: DraftFacts) -> None:
    refuse(facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(SOUND, quantization="fp8"), "quantization=fp8 would be ignored"),
        (replace(SOUND, quantization="fp8", target_quantization=None), "quantization=fp8 would be ignored"),
        (replace(SOUND, mtp_layers=0), "no MTP layer"),
        (replace(SOUND, draft_vocab=True, method=None), "ling.draft_vocab: nothing drafts with it"),
        (replace(SOUND, draft_vocab=True, method="ngram"), "ling.draft_vocab: nothing drafts with it"),
        (replace(SOUND, draft_vocab=True, tensor_parallel=2), "ling.draft_vocab: with tensor parallel 2"),
    ],
)
def test_refusals_name_the_setting(facts: DraftFacts, words: str) -> None:
    with pytest.raises(LingError, match=words):
        refuse(facts)
