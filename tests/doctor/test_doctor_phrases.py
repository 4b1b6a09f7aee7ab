# SPDX-License-Identifier: Apache-2.0
"""The phrases exist in the installed vLLM and match what it writes; the series are those of a real server."""

import importlib.util
import re
from pathlib import Path

import pytest

import vllm_ling
from tests.doctor.clean import V1
from tests.doctor.evidence import FOLDER, GB10, GPU_LOG, LOG, but, lines
from tests.doctor.faults.common import BARE_LOG
from vllm_ling.compat import SUPPORTED_VLLM, installed_vllm
from vllm_ling.doctor.checks.plugin import OUR_VARIABLES
from vllm_ling.doctor.facts import wording
from vllm_ling.doctor.phrases import PHRASES, SERIES, VERSIONS, known_version
from vllm_ling.doctor.registry import run_checks

# Conditional lines that no captured or modelled start shows; their faults inject them.
RARE = {
    "plugin_failed",
    "plugin_error",
    "exception",
    "start_failed",
    "core_failed",
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
    "ling_alarm",
    "ling_decode_refused",
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
        assert version not in phrase.source or name.startswith("ling_") or name in {*RARE, "started"}
        return
    source = (vllm_folder() / phrase.source[version]).read_text()
    # Literals may be broken over lines.
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert phrase.literal in joined, f"{phrase.source[version]} no longer writes {phrase.literal!r}"


# Phrase -> the check that lives by it, and the log that it is sound in.
CHECKS = {
    "moe_mxfp4": "moe_activations",
    "moe_mxfp4_fallback": "moe_activations",
    "linear_kernel": "deep_gemm_scales",
    "e8m0": "deep_gemm_scales",
    "runner_v1": "mtp_layer",
    "kv_cache": "cache_size",
    "prefix_off": "prefix_caching",
    "unknown_variable": "unknown_variables",
    "compiled": "caches",
    "cached": "caches",
    "draft_model": "mtp_layer",
    "asleep": "level_2_sleep",
    "spec_metrics": "accept_length",
    "engine_stats": "concurrency",
    "plugin_failed": "plugin_active",
}
ON_DEEP_GEMM = ("CutlassFp8BlockScaledMMKernel", "DeepGemmFp8BlockScaledMMKernel")


@pytest.mark.fault
@pytest.mark.parametrize("name", CHECKS)
def test_a_vanished_phrase_makes_its_check_unknown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = but(LOG, gpu=GB10)
    if name == "e8m0":
        evidence = lines(evidence, ON_DEEP_GEMM)
    if name in ("runner_v1", "draft_model"):
        evidence = but(evidence, log=f"{V1.log}")
    if name == "moe_mxfp4":  # the plugin's record would answer too
        evidence = but(evidence, log=str(evidence.log).replace("moe mxfp4 = humming", "moe mxfp4 = other"))
    if name == "plugin_failed":
        evidence = but(BARE_LOG, gpu=GB10)
    monkeypatch.setattr(wording, "vanished", lambda version: {name: "no longer written"})
    (tmp_path / "gone").mkdir()
    findings = {f.check: f for f in run_checks(evidence.facts(tmp_path / "gone"))[0]}
    assert findings[CHECKS[name]].outcome == "unknown"
    assert "no longer written" in findings[CHECKS[name]].evidence
    if name != "plugin_failed":
        assert {f.outcome for f in findings.values()} <= {"ok", "unknown"}


def test_every_phrase_of_vllm_is_covered() -> None:
    others = {
        "arguments",  # without it no start is seen
        "engine",
        "architecture",  # says only that it is another model
        "plugin_error",
        "plugin_listed",  # tells two causes of one failure apart
        "moe_fp8",  # as moe_mxfp4
        "moe_int4",
        "moe_unquantized",
        "graphs_off",  # the engine's own line names the mode that is left
        "graphs_done",
        "bench",
        "start_failed",  # each alone says enough
        "core_failed",
        "started",  # uvicorn's
        "exception",  # Python's
    }
    assert set(CHECKS) | others == {name for name in PHRASES if not name.startswith("ling_")}


def test_the_installed_vllm_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = str(installed_vllm())
    wording.vanished.cache_clear()
    assert wording.vanished(installed) == {}
    assert wording.vanished("0.1.0") == {}
    (tmp_path / "config").mkdir()
    (tmp_path / "config/model.py").write_text('"Resolved "\n    "architecture: %s"')
    monkeypatch.setattr(wording, "vllm_folder", lambda: tmp_path)
    wording.vanished.cache_clear()
    gone = wording.vanished(installed)
    wording.vanished.cache_clear()
    assert "no longer writes 'Running: %d reqs' (v1/metrics/loggers.py)" in gone["engine_stats"]
    assert "architecture" not in gone and "ling_active" not in gone


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


def test_the_plugins_own_variables_are_known() -> None:
    package = Path(vllm_ling.__file__).parent
    linked = [folder for folder in package.iterdir() if folder.is_symlink()]
    named = {
        name
        for folder in (package, *linked)
        for path in folder.resolve().rglob("*.py")
        for name in re.findall(r"VLLM_LING_[A-Z_]+", path.read_text())
    }
    assert named == OUR_VARIABLES
