# SPDX-License-Identifier: Apache-2.0
"""No finding on sound configurations, and the captured trap found in what a real server said."""

import re
import shutil
from pathlib import Path

import pytest

from tests.doctor.clean import CLEAN
from tests.doctor.evidence import FOLDER, H200
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


def h200(said: str, folder: Path) -> Facts:
    """Facts of a log, on the H200 that its server ran on; its model folder is not there any more."""
    facts = Facts()
    for key, value in H200.items():
        facts.put(key, value, "test")
    (folder / "server.log").write_text(said)
    read_log(facts, folder / "server.log")
    read_environment(facts, {"HOME": str(folder)})
    return facts


def h200_log(name: str) -> str:
    return (FOLDER / f"gpu-h200-{name}.log").read_text()


def by_outcome(facts: Facts, *outcomes: str) -> dict[str, str]:
    """The evidence of each check with such an outcome."""
    return {one.check: one.evidence for one in run_checks(facts)[0] if one.outcome in outcomes}


@pytest.mark.fault
@pytest.mark.parametrize("name", ["plain", "mtp"])
def test_captured_logs_of_an_h200_show_what_a_benchmark_leaves_behind_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    """vLLM 0.33, V2 runner, CUDA graphs, compilation config as objects, the plugin's first line lost, no comparison."""
    facts = h200(h200_log(name), tmp_path)
    wrong = {"weights_real", "speculation_settings"} if name == "mtp" else {"weights_real"}
    assert set(by_outcome(facts, "fail", "warn")) == wrong
    sound = by_outcome(facts, "ok")
    assert "on HUMMING" in sound["moe_backend"] and "FULL_DECODE_ONLY" in sound["graphs_on"]
    assert "moe decode" in sound["decode_kernels"] and "plugin_active" in sound
    assert "target: up to 8 tokens" in sound["decode_batches"] and "ranks_agree" in sound
    assert "no comparison of it" in by_outcome(facts, "unknown")["decode_path"]


@pytest.mark.fault
@pytest.mark.parametrize("name", ["head", "mtp"])
def test_captured_servers_of_an_ablation_on_an_h200_have_its_random_weights_and_drafts_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    """Of 2.68 tokens a round by lot the first two draft positions make 1.68: vLLM never accepts the third."""
    said, drafts = h200_log(f"ablation-{name}"), name == "mtp"
    facts = h200(said, tmp_path)
    lot = {"speculation_settings", "draft_positions", "draft_alarms"} if drafts else set()
    assert set(by_outcome(facts, "fail", "warn")) == {"weights_real"} | lot
    sound = by_outcome(facts, "ok")
    for model in ("target", "draft") if drafts else ("target",):
        assert f"{model} decode = fused (up to 8 tokens" in sound["decode_path"]
        assert f"{model}: up to 8 tokens" in sound["decode_batches"]
        assert f"{model}_decode" in sound["proofs_hold"]
        # Earlier it was unknown: a graph was captured first, or a comparison showed nothing.
        assert f"{model} decode check = unknown" in said
        assert facts["record.choices"][f"{model} decode check"] == ["ok", "compared at a later batch"]
    assert {"plugin_active", "ranks_agree", "server_started", "deep_gemm_scales"} <= set(sound)
    assert "on HUMMING" in sound["moe_backend"] and "FULL_DECODE_ONLY" in sound["graphs_on"]
    assert all(kernel in sound["decode_kernels"] for kernel in ("moe decode", "lm_head argmax", "linear 576"))
    assert "fp8_online" in sound["head_format"]
    assert ("the target's module object" in sound["draft_head"]) is drafts


@pytest.mark.fault
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("(?:PROOF ok: target_decode: |target decode check = ok )", "was not compared with vLLM's layers"),
        ("target decode check = ok ", "is proven, but not for every batch"),
    ],
    ids=["none", "one kind"],
)
@pytest.mark.parametrize("name", ["head", "mtp"])
def test_a_captured_server_that_never_came_to_compare_its_fused_path_is_unknown(
    name: str, lost: str, said: str, tmp_path: Path
) -> None:
    log, count = re.subn(rf"^.*{lost}.*\n", "", h200_log(f"ablation-{name}"), flags=re.MULTILINE)
    assert count >= 1
    evidence = by_outcome(h200(log, tmp_path), "unknown")["decode_path"]
    assert said in evidence and "a graph was captured before" in evidence


@pytest.mark.clean
@pytest.mark.parametrize("name", ["head", "mtp"])
def test_without_random_weights_and_drafts_by_lot_an_ablations_servers_have_no_findings(
    name: str, tmp_path: Path
) -> None:
    """Unknown is only what the model folder would tell, and how drafts fare that nobody counted."""
    said = h200_log(f"ablation-{name}")
    for what in (
        r"'load_format': 'dummy', ",
        r", 'rejection_sample_method': 'synthetic', 'synthetic_acceptance_length': [\d.]+",
        r"^.*(?:SpecDecoding metrics|ALARM draft_tail).*\n",
    ):
        said = re.sub(what, "", said, flags=re.MULTILINE)
    facts = h200(said.replace("load_format=dummy", "load_format=auto"), tmp_path)
    left = [finding for finding in complaints(facts) if not finding.evidence.startswith("checkpoint.")]
    counted = {"accept_length", "draft_positions", "speculation_pays"} if name == "mtp" else set()
    assert {finding.check for finding in left} == counted
    assert all(finding.outcome == "unknown" for finding in complaints(facts))


def test_the_bundled_model_before_serving(tmp_path: Path) -> None:
    facts = Facts()
    facts.put("gpu.names", [], "test")
    put_command(facts, ["tiny-ling", "--dtype", "bfloat16"])
    read_environment(facts, {"HOME": str(tmp_path)})
    read_checkpoint(facts, "tiny-ling")
    assert complaints(facts) == []
