# SPDX-License-Identifier: Apache-2.0
"""Accept length from counters, as vLLM prints them."""

import pytest

from vllm_ling.eval.serving.metrics import SpecCounters, parse_counters

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny-ling"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="tiny-ling"} 10.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="tiny-ling"} 1.79e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny-ling"} 90.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny-ling"} 60.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny-ling",position="0"} 29.0
"""


def test_engines_add_up_and_neighbours_do_not_count() -> None:
    assert parse_counters(PAGE) == SpecCounters(drafts=40, accepted=60, accepted_at=(29,))


def test_accept_length_is_taken_between_two_readings() -> None:
    earlier, later = SpecCounters(drafts=100, accepted=0), SpecCounters(drafts=140, accepted=60)
    assert later.since(earlier).accept_length == pytest.approx(2.5)


def test_no_speculation_means_no_accept_length() -> None:
    assert parse_counters("").accept_length is None
    assert SpecCounters(drafts=5, accepted=0).accept_length == 1.0


def test_only_the_counters_are_parsed() -> None:
    """The rest of a page may be large, or such as no parser takes."""
    assert parse_counters("{{{ garbage\n" + PAGE + 'other{x="\n') == parse_counters(PAGE)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_counters_that_are_no_numbers_are_refused(value: str) -> None:
    with pytest.raises(ValueError):
        parse_counters(PAGE.replace("30.0", value))
    with pytest.raises(ValueError):
        parse_counters(PAGE.replace('position="0"', f'position="{value}"'))
