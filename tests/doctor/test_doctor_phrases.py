# SPDX-License-Identifier: Apache-2.0
"""The phrases exist in the installed vLLM and match what it writes; the series are those of a real server."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.doctor.evidence import FOLDER, GPU_LOG
from vllm_ling.compat import SUPPORTED_VLLM, installed_vllm
from vllm_ling.doctor.phrases import PHRASES, SERIES, VERSIONS, known_version

# Conditional lines that no captured or modelled start shows; their faults inject them.
RARE = {
    "plugin_failed",
    "plugin_error",
    "moe_mxfp4_fallback",
    "moe_fp8",
    "moe_int4",
    "moe_unquantized",
    "e8m0",
    "graphs_off",
    "prefix_off",
    "unknown_variable",
    "compiled",
    "asleep",
    "bench",
    "ling_inactive",
    "ling_fault",
    "ling_error",
    "runner_v1",
}


def vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.mark.parametrize("name", PHRASES)
def test_the_installed_vllm_still_says_so(name: str) -> None:
    phrase = PHRASES[name]
    version = ".".join((installed_vllm() or "").split(".")[:2])
    assert version in VERSIONS
    if isinstance(phrase.source, dict) and not phrase.source.get(version):
        assert version not in phrase.source or name.startswith("ling_") or name in RARE
        return
    source = (vllm_folder() / phrase.source[version]).read_text()
    # Literals may be broken over lines.
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert phrase.literal in joined, f"{phrase.source[version]} no longer writes {phrase.literal!r}"


@pytest.mark.parametrize("name", [name for name in PHRASES if name not in RARE])
def test_the_pattern_matches_a_line(name: str) -> None:
    logs = GPU_LOG + (FOLDER / "cpu-mtp.log").read_text()
    found = [line for line in logs.splitlines() if PHRASES[name].pattern.search(line)]
    assert found
    assert all(PHRASES[name].marker in line for line in found)


def test_every_series_was_exported_by_a_real_server() -> None:
    page = (FOLDER / "cpu-mtp.after").read_text()
    assert [name for name in SERIES if not re.search(rf"^{re.escape(name)}[{{ ]", page, re.MULTILINE)] == []


def test_the_versions_are_those_of_the_window() -> None:
    assert all(known_version(f"{version}.0") for version in VERSIONS)
    assert f">={VERSIONS[0]},<0.{int(VERSIONS[-1].split('.')[1]) + 1}" == SUPPORTED_VLLM
    assert not known_version("0.34.0") and not known_version("0.3")
