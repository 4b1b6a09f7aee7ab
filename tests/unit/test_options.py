# SPDX-License-Identifier: Apache-2.0
"""vllm_ling.options: every bad option is refused by name."""

import pytest

from vllm_ling.errors import LingError
from vllm_ling.options import LingOptions, parse_options


def test_no_section_means_defaults() -> None:
    assert parse_options(None) == parse_options({}) == parse_options({"other": 1}) == LingOptions()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"lm_haed": "fp8"}, ["unknown option ling.lm_haed", "lm_head"]),
        ({"lm_head": "fp4"}, ["ling.lm_head='fp4'", "'bf16'"]),
        ({"moe": True}, ["ling.moe=True"]),
        ({"decode": "fast"}, ["ling.decode='fast'", "'fused'", "'layers'"]),
        ({"inject_fault": "head_bytes", "lm_head": "bf16"}, ["inject_fault=head_bytes", "lm_head=bf16"]),
        ({"on_probe": "bf16", "lm_head": "bf16"}, ["on_probe=bf16"]),
        ({"draft_vocab": 5}, ["ling.draft_vocab"]),
        ({"draft_gate": "on"}, ["ling.draft_gate"]),
        ({"draft_vocab": "a.json", "inject_fault": "head_bytes"}, ["inject_fault=head_bytes", "draft_vocab"]),
        ({"a": 1, "b": 2}, ["ling.a", "ling.b"]),
        ("fp8", ["'ling' must be an object"]),
    ],
)
def test_bad_options_are_named(section: object, words: list[str]) -> None:
    with pytest.raises(LingError) as caught:
        parse_options({"ling": section})
    message = str(caught.value)
    assert "\n" not in message and message.startswith("--additional-config")
    assert all(word in message for word in words), message
