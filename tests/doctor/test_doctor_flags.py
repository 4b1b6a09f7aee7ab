# SPDX-License-Identifier: Apache-2.0
"""Serve commands as people type and paste them, and the flags of the installed vLLM."""

from pathlib import Path

import pytest

from vllm_ling.doctor.checks.command import _is_known
from vllm_ling.doctor.facts.flags import read_flags
from vllm_ling.doctor.facts.known import known_flags

MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("m --enforce-eager", {"model": "m", "enforce_eager": True}),
        ("vllm serve m --no-enable-prefix-caching", {"model": "m", "enable_prefix_caching": False}),
        ("--enforce-eager m", {"model": "m", "enforce_eager": True}),
        ("m -tp 2 -O0", {"model": "m", "tensor_parallel_size": 2, "optimization_level": 0}),
        ("m -O=3", {"model": "m", "optimization_level": 3}),
        ("m -cc.cudagraph_mode=NONE", {"model": "m", "compilation_config": {"cudagraph_mode": "NONE"}}),
        ("m -sc.method mtp --speculative-config.num_speculative_tokens 3", {"model": "m", "speculative_config": MTP}),
        ("m --moe_backend=humming", {"model": "m", "moe_backend": "humming"}),
        ("m --cudagraph-capture-sizes 1 2 4 --port 8000", {"cudagraph_capture_sizes": [1, 2, 4], "port": 8000}),
        ("m --served-model-name a b -q fp8", {"served_model_name": "[a, b]", "quantization": "fp8"}),
        ("m --compilation-config 3", {"compilation_config": {"mode": 3}}),
        ("m --gpu-memory-utilization 0.85", {"gpu_memory_utilization": 0.85}),
    ],
)  # fmt: skip
def test_spellings(line: str, given: dict[str, object]) -> None:
    flags = read_flags(line.split())
    assert flags.problems == []
    assert {name: value for name, value in flags.given.items() if name in given or name == "model"} == {
        "model": "m",
        **given,
    }


def test_a_config_file_comes_behind_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from-file\nmax-num-seqs: 1\nenforce-eager: true\n"
        "speculative-config: {method: mtp, num_speculative_tokens: 3}\n"
    )
    flags = read_flags(["typed", "--config", str(path), "--max-num-seqs", "4"])
    assert flags.problems == []
    assert flags.given == {
        "model": "typed",
        "max_num_seqs": 4,
        "enforce_eager": True,
        "speculative_config": MTP,
    }
    assert "--enforce-eager" in flags.names


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "!!python/object/apply:os.system ['true']", "\x00"])
def test_a_damaged_config_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    (problem,) = read_flags(["m", "--config", str(path)]).problems
    assert str(path) in problem


def test_the_flags_are_those_of_vllms_own_parser() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm").add_subparsers(dest="subparser")
    serve = ServeSubcommand().subparser_init(parser)
    real = {option for action in serve._actions for option in action.option_strings}
    assert len(real) > 200
    assert [flag for flag in sorted(real) if not _is_known(flag, known_flags())] == []
    assert known_flags() - real == {"-O"}


def test_a_unique_beginning_is_a_flag() -> None:
    known = frozenset({"--max-model-len", "--max-num-seqs", "--enforce-eager"})
    assert _is_known("--enforce", known) and _is_known("--no-enforce-eager", known)
    assert not _is_known("--max", known) and not _is_known("--no-such", known)
