# SPDX-License-Identifier: Apache-2.0
"""No finding on sound configurations, and the captured trap found in what a real server said."""

import re
import shutil
from pathlib import Path

import pytest

from tests.doctor.clean import CLEAN
from tests.doctor.evidence import FOLDER
from tests.widened import widen
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.doctor.facts.checkpoint import read_checkpoint
from vllm_ling.doctor.facts.environment import read_environment
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.server import parse_samples, put_samples
from vllm_ling.doctor.facts.settings import put_command
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Finding, exit_code
from vllm_ling.doctor.registry import run_checks


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the captured servers of two ranks served."""
    return widen(tmp_path_factory.mktemp("wide") / "model")


def captured(name: str, source: str, folder: Path, model: Path | None = None) -> Facts:
    """Facts of a captured CPU server, from its log or its two pages of metrics; `model` is tiny-ling by default."""
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
    read_checkpoint(facts, str(model or tiny_ling_path()))
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


@pytest.mark.clean
@pytest.mark.parametrize("source", ["log", "live"])
@pytest.mark.parametrize("name", ["ranks-mtp", "ranks-plain"])
def test_captured_servers_of_two_ranks_have_no_findings(
    name: str, source: str, tmp_path: Path, wide: Path
) -> None:
    facts = captured(name, source, tmp_path, wide)
    assert complaints(facts) == []
    assert facts["serve.tensor_parallel_size"] == 2 and len(facts["record.ranks"]) == 2


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


def h200_log(name: str, compared: bool) -> str:
    """A captured log of an H200 with or without the lines of the comparison at load, derived where it lacks them."""
    said = (FOLDER / f"gpu-h200-{name}.log").read_text()
    for model in ("target", "draft") if name == "mtp" else ("target",):
        if not compared:
            said = re.sub(rf"^.*PROOF ok: {model}_decode: .*\n", "", said, flags=re.MULTILINE)
        elif f"PROOF ok: {model}_decode: " not in said:
            proof = f"PROOF ok: {model}_decode: 2 parts agree with vLLM's layers, stream and states"
            path = rf"^(.*vllm-ling: ){model} decode = fused .*\n"
            said, count = re.subn(path, rf"\g<0>\1{proof}\n", said, flags=re.MULTILINE)
            assert count == 1
    return said


@pytest.mark.fault
@pytest.mark.parametrize("compared", [True, False], ids=["compared", "not_compared"])
@pytest.mark.parametrize("name", ["plain", "mtp"])
def test_captured_logs_of_an_h200_show_what_a_benchmark_leaves_behind_and_nothing_else(
    name: str, compared: bool, tmp_path: Path
) -> None:
    """vLLM 0.33, V2 runner, CUDA graphs, compilation config as objects, the plugin's first line lost."""
    facts = Facts()
    facts.put("gpu.names", [], "test")
    (tmp_path / "server.log").write_text(h200_log(name, compared))
    read_log(facts, tmp_path / "server.log")
    read_environment(facts, {"HOME": str(tmp_path)})
    findings, _ = run_checks(facts)
    wrong = {finding.check for finding in findings if finding.outcome in ("fail", "warn")}
    assert wrong == ({"weights_real", "speculation_settings"} if name == "mtp" else {"weights_real"})
    sound = {finding.check: finding.evidence for finding in findings if finding.outcome == "ok"}
    assert "on HUMMING" in sound["moe_backend"] and "FULL_DECODE_ONLY" in sound["graphs_on"]
    assert "moe decode" in sound["decode_kernels"] and "plugin_active" in sound
    assert "target: up to 8 tokens" in sound["decode_batches"] and "ranks_agree" in sound
    assert ("fused" in sound.get("decode_path", "")) is compared
    if not compared:
        assert {f.check: f.outcome for f in findings}["decode_path"] == "unknown"


def test_the_bundled_model_before_serving(tmp_path: Path) -> None:
    facts = Facts()
    facts.put("gpu.names", [], "test")
    put_command(facts, ["tiny-ling", "--dtype", "bfloat16"])
    read_environment(facts, {"HOME": str(tmp_path)})
    read_checkpoint(facts, "tiny-ling")
    assert complaints(facts) == []
