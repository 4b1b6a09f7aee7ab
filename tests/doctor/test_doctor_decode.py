# SPDX-License-Identifier: Apache-2.0
"""The decode checks read reasons word by word, so the words must be those that the plugin writes."""

import importlib.util
import json
from pathlib import Path

import pytest

import vllm_ling.eval
from vllm_ling.decode.policy import BatchFacts, choose_path
from vllm_ling.doctor.checks import decode
from vllm_ling.doctor.phrases import PHRASES

KINDS = {
    "decode": BatchFacts(4, 8),
    "prompt": BatchFacts(4, 8, prefills=1),
    "large": BatchFacts(9, 8),
    "long": BatchFacts(8, 8, longest=9),
    "mixed": BatchFacts(8, 8, mixed=True),
    "unusual": BatchFacts(8, 8, unusual="an index of the batch is torch.int64 with strides (1,)"),
}


def source(module: str) -> str:
    """Text of a module that needs a GPU's packages to be imported."""
    spec = importlib.util.find_spec("vllm_ling")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / f"{module}.py").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_is_told_apart(kind: str) -> None:
    reason = choose_path(KINDS[kind])[1]
    assert bool(decode._MEANT_FOR_LAYERS.fullmatch(reason)) == (kind in ("prompt", "large"))
    assert bool(decode._LONG_SEQUENCE.fullmatch(reason)) == (kind == "long")
    assert (reason == decode._MIXED) == (kind == "mixed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_batch_is_read_from_the_log(kind: str) -> None:
    path, reason = choose_path(KINDS[kind])
    what = f"target path: {reason}"
    found = PHRASES["ling_choice"].pattern.search(f"INFO vllm-ling: {what} = {path} (ling.decode=auto)")
    assert found is not None and found.groups() == (what, path, "ling.decode=auto")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("models/ling", f'"{decode._ONE_GPU}"'),
        ("models/ling", '"target decode"'),
        ("spec_decode/mtp", f'"{decode._ONE_GPU_DRAFT}"'),
        ("spec_decode/mtp", '"draft decode"'),
        ("decode/fused", "up to {self._built.most} tokens"),
        ("decode/fused", "} path: {reason}"),
        ("decode/fused", "ling.decode=fused cannot be honoured ({reason}); vLLM's layers decode"),
        ("decode/from_vllm", "(ling.linear=ling"),
        ("decode/from_vllm", "(ling.moe=ling"),
    ],
)
def test_the_plugin_still_says_so(module: str, words: str) -> None:
    assert words in source(module)


def test_the_cost_of_vllms_layers_is_what_was_measured() -> None:
    measured = json.loads((Path(vllm_ling.eval.__file__).parent / "results/h200-decode.json").read_text())
    row = next(row for row in measured["rows"] if (row["workload"], row["context"]) == ("plain", 128))
    assert measured["engines"]["ours2 plain"]["options"]["decode"] == "layers"
    assert measured["engines"]["ours plain"]["choices"]["target decode"][0] == "fused"
    launches = row["ours2_launches_per_token"] / row["launches_per_token"]
    times = row["ours2_gpu_ms_per_step"] / row["gpu_ms_per_step"]
    said = f"the same bytes in {launches:.0f} times the launches per token: {times:.1f} times the fused path's GPU time"
    assert f"{said}, on an H200" == decode._COST
