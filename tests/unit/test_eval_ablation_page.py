# SPDX-License-Identifier: Apache-2.0
"""The page of an ablation: table and plot from the file alone, with what is random, set or proven said beside them."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.page import SCHEMA_VERSION, markdown, plot, write_page
from vllm_ling.eval.files import write_json

CHOICES = {"lm_head": "fp8_online", "moe mxfp4": "humming", "moe decode": "ling", "linear 512 x 128": "ling"}


def page_data() -> dict[str, Any]:
    """Two stages of made-up figures, the second with drafts accepted by lot."""
    load: dict[str, Any] = {"load": "text 1024/256", "tok_per_s": 160.0, "spread": [158.0, 161.0]}
    load |= {"tpot_ms": 6.25, "ttft_ms": 95.0, "latency_s_mean": 1.7, "accept_length": None, "gap": None}
    stage: dict[str, Any] = {"name": "stock", "failed": 0, "speculates": False, "set_accept_length": None}
    stage |= {"gsm8k": None, "workload": None, "real_gain": None, "accuracy": None}
    stage |= {"loads": [load | {"gain": {"total": 1.0}}]}
    stage |= {"server": {"vllm": "0.33.0", "plugin": False, "choices": {}, "proofs": {}}}
    fast = load | {"tok_per_s": 500.0, "tpot_ms": 2.0, "accept_length": 2.66, "gain": {"total": 2.5}}
    record = {"vllm": "0.33.0", "plugin": True, "choices": CHOICES | {"target decode": "fused"}}
    mtp = stage | {"name": "mtp", "speculates": True, "set_accept_length": 2.68, "loads": [fast]}
    mtp |= {"server": record | {"proofs": {"draft_head": "", "target_decode": ""}}}
    data = {"schema_version": SCHEMA_VERSION, "base": "stock", "margin": 0.01, "failures": {}}
    return data | {"random_weights": "flash-random-weights", "stages": [stage, mtp]}


def test_the_page_says_what_is_random_set_and_proven() -> None:
    text = markdown(page_data())
    assert "| stock | 160.0 (158.0 to 161.0) | 6.25 | 95 | - | +0.0% |" in text
    assert "| mtp | 500.0 (158.0 to 161.0) | 2.00 | 95 | 2.66 | +150.0% |" in text
    assert "flash-random-weights: the weights are random" in text
    assert "mtp: accept length 2.68 is set" in text and "stock: accept length" not in text
    assert "stock: vLLM 0.33.0, the plugin is off" in text
    assert (
        "mtp: vLLM 0.33.0, lm_head = fp8_online, moe decode = ling, target decode = fused, linear = ling (1 of 1); "
        "proofs: draft_head, target_decode" in text
    )


def test_the_plot_has_a_bar_a_stage_of_the_right_length() -> None:
    root = ElementTree.fromstring(plot(page_data()))
    bars = [node for node in root.iter() if node.tag.endswith("rect")]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(bars) == 2 and widths[0] / widths[1] == pytest.approx(6.25 / 2.0, rel=0.01)
    words = " ".join(node.text or "" for node in root.iter())
    assert "mtp: 2.00 ms, 500 tok/s, +150.0% (accept length 2.68, set)" in words
    assert "stock: 6.25 ms, 160 tok/s" in words
    assert plot(page_data() | {"stages": []}) == ""


def test_the_page_is_made_again_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    write_json(path, page_data())
    text = write_page(path)
    assert path.with_suffix(".md").read_text() == text == markdown(page_data())
    assert path.with_suffix(".svg").read_text() == plot(page_data())
    for bad, said in (("{}", "no result of eval ablate"), ('{"schema_version": 1}', "schema_version 1")):
        path.write_text(bad)
        with pytest.raises(LingError, match=said):
            write_page(path)
