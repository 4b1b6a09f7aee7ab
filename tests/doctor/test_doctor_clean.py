# SPDX-License-Identifier: Apache-2.0
"""No finding on sound configurations, and the captured trap found in what a real server said."""

import shutil
from pathlib import Path

import pytest

from tests.doctor.clean import CLEAN
from tests.doctor.evidence import FOLDER
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.doctor.facts.checkpoint import read_checkpoint
from vllm_ling.doctor.facts.environment import read_environment
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.server import parse_samples, put_samples
from vllm_ling.doctor.facts.settings import put_command
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Finding, exit_code
from vllm_ling.doctor.registry import run_checks


def captured(name: str, source: str, folder: Path) -> Facts:
    """Facts of a captured CPU server, from its log or its two pages of metrics."""
    facts = Facts()
    facts.put("gpu.names", [], "test")
    if source == "log":
        read_log(facts, Path(shutil.copy(FOLDER / f"cpu-{name}.log", folder)))
    else:
        facts.sources.add("live")
        facts.put("server.version", "0.32.0", "/version")
        before, after = ((FOLDER / f"cpu-{name}.{when}").read_text() for when in ("before", "after"))
        put_samples(facts, parse_samples(before), parse_samples(after), "captured")
    facts.put("installed.vllm", "0.32.0", "test")
    read_environment(facts, {"HOME": str(folder)})
    read_checkpoint(facts, str(tiny_ling_path()))
    return facts


def complaints(facts: Facts) -> list[Finding]:
    findings, _ = run_checks(facts)
    assert len(findings) > 15
    return [finding for finding in findings if finding.outcome != "ok"]


@pytest.mark.clean
@pytest.mark.parametrize("name", CLEAN)
def test_a_sound_configuration_has_no_findings(name: str, tmp_path: Path) -> None:
    assert complaints(CLEAN[name].facts(tmp_path)) == []


@pytest.mark.clean
@pytest.mark.parametrize("source", ["log", "live"])
@pytest.mark.parametrize("name", ["mtp", "plain"])
def test_a_captured_sound_server_has_no_findings(name: str, source: str, tmp_path: Path) -> None:
    assert complaints(captured(name, source, tmp_path)) == []


@pytest.mark.fault
@pytest.mark.parametrize("source", ["log", "live"])
def test_the_captured_trap_is_found(source: str, tmp_path: Path) -> None:
    found = {finding.check: finding for finding in complaints(captured("trap", source, tmp_path))}
    assert {"faults_allowed", "draft_head", "accept_length", "speculation_pays"} <= set(found)
    assert "draft_head_not_shared" in found["draft_head"].evidence
    assert exit_code(list(found.values())) == 2


@pytest.mark.fault
def test_a_captured_failed_start_is_explained(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in complaints(captured("two-ranks", "log", tmp_path))}
    assert {name for name, finding in found.items() if finding.outcome != "unknown"} == {"server_started"}
    assert "is not divisible by weight quantization block_n" in found["server_started"].evidence
    assert "--tensor-parallel-size 1" in found["server_started"].fix


@pytest.mark.fault
def test_a_captured_benchmark_on_random_tokens_is_found(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in complaints(captured("random", "live", tmp_path))}
    assert "ignore_eos" in found["random_tokens"].evidence
    # The draft is sound; what it is asked to continue is noise.
    assert not {"draft_head", "plugin_active", "proofs_hold", "faults_allowed", "moe_backend"} & set(found)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["plain", "mtp"])
def test_captured_logs_of_an_h200_show_what_a_benchmark_leaves_behind_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    """vLLM 0.33, V2 runner, CUDA graphs, compilation config as objects, the plugin's first line lost."""
    facts = Facts()
    facts.put("gpu.names", [], "test")
    read_log(facts, Path(shutil.copy(FOLDER / f"gpu-h200-{name}.log", tmp_path)))
    read_environment(facts, {"HOME": str(tmp_path)})
    findings, _ = run_checks(facts)
    wrong = {finding.check for finding in findings if finding.outcome in ("fail", "warn")}
    assert wrong == ({"weights_real", "speculation_settings"} if name == "mtp" else {"weights_real"})
    sound = {finding.check: finding.evidence for finding in findings if finding.outcome == "ok"}
    assert "on HUMMING" in sound["moe_backend"] and "FULL_DECODE_ONLY" in sound["graphs_on"]
    assert "moe decode" in sound["decode_kernels"] and "fused" in sound["decode_path"]
    assert "target: up to 8 tokens" in sound["decode_batches"] and "plugin_active" in sound


def test_the_bundled_model_before_serving(tmp_path: Path) -> None:
    facts = Facts()
    facts.put("gpu.names", [], "test")
    put_command(facts, ["tiny-ling", "--dtype", "bfloat16"])
    read_environment(facts, {"HOME": str(tmp_path)})
    read_checkpoint(facts, "tiny-ling")
    assert complaints(facts) == []
