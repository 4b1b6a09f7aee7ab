# SPDX-License-Identifier: Apache-2.0
"""Costs of findings on the full-size model, in bytes and in time on a GB10."""

from pathlib import Path

import pytest

from vllm_ling.checkpoint.quantization import quantization_section
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor import costs
from vllm_ling.doctor.facts import gpu
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.roofline.models import PUBLISHED


@pytest.fixture
def flash() -> Facts:
    """Ling-3.0-flash in FP4 on a GB10."""
    config = dict(PUBLISHED["flash"])
    config["quantization_config"] = quantization_section(LingShape.from_config(config), "fp4")
    facts = Facts()
    facts.put("_checkpoint.shape", LingShape.from_config(config), "test")
    facts.put("checkpoint.format", "fp4", "test")
    facts.put("gpu.names", ["NVIDIA GB10"], "test")
    return facts


def test_a_bf16_head_costs_as_the_study_says(flash: Facts) -> None:
    # 157,184 x 2,560 weights, two bytes instead of one, at 235 GB/s.
    assert costs.bf16_head(flash) == "reads 0.40 GB more per token: about 1.7 ms on GB10"
    assert costs.stock_head(flash) == costs.bf16_head(flash)


def test_costs_scale_with_what_is_read(flash: Facts) -> None:
    all_three, last = costs.useless_drafts(flash, 3, 0), costs.useless_drafts(flash, 3, 2)
    assert "more per round" in all_three

    def gigabytes(text: str) -> float:
        return float(text.split()[1])

    assert gigabytes(all_three) > 2 * gigabytes(last) > 0
    assert costs.useless_drafts(flash, 2, 2) == "reads 0.00 MB more per round: under 0.1 ms on GB10"


def test_unknown_models_cost_nothing_that_is_known() -> None:
    assert costs.bf16_head(Facts()) == costs.useless_drafts(Facts(), 3, 0) == ""


def test_memory_of_a_gpu_that_shares_the_systems(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       125518936 kB\nMemFree:         2055324 kB\nMemAvailable:   118045120 kB\n"
    )
    facts = Facts()
    gpu.system_memory(facts, path)
    assert facts["gpu.memory_bytes"] == 125518936 * 1024
    assert facts["gpu.available_bytes"] == 118045120 * 1024
    path.write_text("MemTotal: much\n")
    damaged = Facts()
    gpu.system_memory(damaged, path)
    assert "gpu.memory_bytes" not in damaged
