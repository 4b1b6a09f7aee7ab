# SPDX-License-Identifier: Apache-2.0
"""Recipes hold what their schemas ask for, and every serve command that the repository shows is one vLLM takes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.doctor.evidence import GB10, H200, Evidence, config
from tests.unit.recipe_files import (
    README,
    RECIPES_README,
    ROOT,
    SITE,
    SPARKRUN,
    Command,
    documented_commands,
    load,
    site_commands,
    sparkrun_command,
)
from vllm_ling import __version__
from vllm_ling.compat import SUPPORTED_VLLM
from vllm_ling.doctor.finding import Finding
from vllm_ling.doctor.registry import run_checks
from vllm_ling.errors import LingError
from vllm_ling.options import parse_options

WINDOW = SpecifierSet(SUPPORTED_VLLM)
MACHINES: dict[str, dict[str, Any]] = {
    "dgx_spark_gb10": GB10,
    "rtx_pro_6000": {
        "gpu.names": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"],
        "gpu.capability": 120,
        "gpu.unified": False,
    },
    "h100": {"gpu.names": ["NVIDIA H100 80GB HBM3"], "gpu.capability": 90, "gpu.unified": False},
    "h200": H200,
}
# Where the commands of one machine stand; all must mean the same.
SPARK = ("site:dgx_spark_gb10", "sparkrun", "guide:", "recipes/README.md:DGX Spark", "README.md:DGX Spark")
SITE_COMMANDS = site_commands(load(SITE))
COMMANDS = [
    *SITE_COMMANDS.values(),
    sparkrun_command(load(SPARKRUN)),
    *documented_commands("guide", load(SITE)["guide"]),
    *documented_commands("recipes/README.md", RECIPES_README.read_text()),
    *documented_commands("README.md", README.read_text()),
]
BAD = {
    "misspelt": ("--max-modl-len", "humming"),
    "abbreviated": ("--max-num-seq", "1"),
    "not a choice": ("--moe-backend", "huming"),
    "not a number": ("--max-model-len", "long"),
    "broken JSON": ("--speculative-config", '{"method": "mtp"'),
    "a parser that vLLM lacks": ("--reasoning-parser", "ling33"),
    "a stray word": ("humming",),
}
PARSE = """
import contextlib, io, json, sys
from vllm.benchmarks.serve import add_cli_args
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

command, top = ServeSubcommand(), FlexibleArgumentParser(prog="vllm-ling")
serve = command.subparser_init(top.add_subparsers(dest="subparser", required=True))
bench = FlexibleArgumentParser(prog="vllm bench serve")
add_cli_args(bench)
known = {"reasoning_parser": ReasoningParserManager.list_registered(),
         "tool_call_parser": ToolParserManager.list_registered()}


def parse(words, is_bench):
    flags = [word.partition("=")[0].partition(".")[0].replace("_", "-") for word in words if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in (bench if is_bench else serve)._option_string_actions]
    if unknown:  # argparse itself would take an abbreviation
        return {"error": f"unknown {unknown}"}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = bench.parse_args(words) if is_bench else top.parse_args(["serve", *words])
            if not is_bench:
                command.validate(args)
    except (SystemExit, Exception) as error:
        return {"error": f"{error} {said.getvalue()}"}
    for name, names in known.items():
        if getattr(args, name, None) and getattr(args, name) not in names:
            return {"error": f"no such {name}: {getattr(args, name)}"}
    plain = {name: getattr(args, name, None) for name in ("model_tag", "additional_config")}
    return {"error": None, "args": {name: repr(value) for name, value in vars(args).items()} | plain}


jobs = json.load(open(sys.argv[1]))
json.dump([parse(*job) for job in jobs], open(sys.argv[2], "w"))
"""


def misspelt_recipes() -> dict[str, Command]:
    """The commands of recipes with one letter missing."""
    site, sparkrun = (
        yaml.safe_load(path.read_text().replace("--max-model-len", "--max-modl-len"))
        for path in (SITE, SPARKRUN)
    )
    return {
        "misspelt in the site's recipe": site_commands(site)["rtx_pro_6000"],
        "misspelt in sparkrun's recipe": sparkrun_command(sparkrun),
    }


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM's own parsers make of every command, by its place, and of the bad ones; one process, for its import."""
    folder = tmp_path_factory.mktemp("parse")
    good = SITE_COMMANDS["h200"].words
    jobs = {command.where: (command.words, command.bench) for command in COMMANDS}
    jobs |= {name: ((*good, *words), False) for name, words in BAD.items()}
    jobs |= {name: (command.words, False) for name, command in misspelt_recipes().items()}
    (folder / "jobs").write_text(json.dumps(list(jobs.values())))
    done = subprocess.run(
        [sys.executable, "-c", PARSE, str(folder / "jobs"), str(folder / "results")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads((folder / "results").read_text()), strict=True))


def doctor(command: Command, machine: Mapping[str, Any], folder: Path) -> list[Finding]:
    """What doctor's static part finds bad about the flags on a machine with a sound checkpoint."""
    evidence = Evidence(
        words=command.words[1:],
        gpu=machine,
        env=command.env,
        config=config(max_position_embeddings=load(SITE)["model"]["context_length"]),
    )
    findings, _ = run_checks(evidence.facts(folder))
    return [finding for finding in findings if finding.outcome in ("fail", "warn")]


def test_every_place_with_a_command_was_found() -> None:
    places = {command.where for command in COMMANDS}
    assert {*SPARK, "README.md:H200", *(f"site:{gpu}" for gpu in MACHINES)} <= places
    assert sum(command.bench for command in COMMANDS) >= 2


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.where)
def test_vllm_takes_the_command(command: Command, parsed: dict[str, dict[str, Any]]) -> None:
    result = parsed[command.where]
    assert result["error"] is None
    if not command.bench:
        assert result["args"]["model_tag"] == command.words[0]
        parse_options(result["args"]["additional_config"])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_command_is_found(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    error = parsed[name]["error"]
    assert error is not None
    assert next(word for word in BAD[name] if word in error)


@pytest.mark.parametrize("name", ["misspelt in the site's recipe", "misspelt in sparkrun's recipe"])
def test_a_misspelt_flag_in_a_recipe_is_found(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    assert parsed[name]["error"] == "unknown ['--max-modl-len']"


def test_a_misspelt_ling_option_is_found() -> None:
    with pytest.raises(LingError, match=r"unknown option ling\.mo "):
        parse_options({"ling": {"mo": "ling"}})


@pytest.mark.parametrize("where", SPARK[1:])
def test_the_spark_commands_mean_the_same(where: str, parsed: dict[str, dict[str, Any]]) -> None:
    place = {"host", "port"}
    first, other = (
        {name: value for name, value in parsed[at]["args"].items() if name not in place}
        for at in (SPARK[0], where)
    )
    assert other == first


def test_the_h200_commands_mean_the_same(parsed: dict[str, dict[str, Any]]) -> None:
    assert parsed["site:h200"]["args"] == parsed["README.md:H200"]["args"]


def test_the_table_of_machines_is_the_recipe() -> None:
    rows = re.findall(
        r"^\| (?:DGX|RTX|H\d)[^|]*\|[^|]*\| `([^`]*)` \|", RECIPES_README.read_text(), re.MULTILINE
    )
    overrides = load(SITE)["variants"]["default"]["hardware_overrides"]
    assert [row.split() for row in rows] == [overrides[gpu]["extra_args"] for gpu in MACHINES]


@pytest.mark.parametrize("gpu", MACHINES)
def test_doctor_has_nothing_to_say_about_the_recipe(gpu: str, tmp_path: Path) -> None:
    assert doctor(SITE_COMMANDS[gpu], MACHINES[gpu], tmp_path) == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.where in SPARK], ids=lambda c: c.where)
def test_doctor_fails_no_spark_command(command: Command, tmp_path: Path) -> None:
    found = doctor(command, GB10, tmp_path)
    assert [finding for finding in found if finding.outcome == "fail"] == []
    # The recipes set what doctor would warn of.
    assert found == [] or command.where == "README.md:DGX Spark"


@pytest.mark.parametrize(
    ("flags", "check"),
    [
        (("--gpu-memory-utilization", "0.95"), "unified_memory"),
        (("--enforce-eager",), "graphs_on"),
        (
            ("--additional-config", '{"ling": {"on_fault": "warn", "inject_fault": "head_bytes"}}'),
            "faults_allowed",
        ),
    ],
)
def test_doctor_would_find_a_bad_flag(flags: tuple[str, ...], check: str, tmp_path: Path) -> None:
    sound = SITE_COMMANDS["dgx_spark_gb10"]
    found = doctor(dataclasses.replace(sound, words=(*sound.words, *flags)), GB10, tmp_path)
    assert check in [finding.check for finding in found if finding.outcome == "fail"]


def test_site_recipe_has_the_fields_of_its_schema() -> None:
    recipe = load(SITE)
    sections = ["meta", "model", "features", "opt_in_features", "variants", "compatible_strategies"]
    assert list(recipe) == [*sections, "hardware_overrides", "strategy_overrides", "guide"]
    meta, model = recipe["meta"], recipe["model"]
    for name in ("title", "slug", "provider", "description"):
        assert isinstance(meta[name], str) and meta[name], name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", meta["slug"])
    assert meta["date_added"] <= meta["date_updated"]
    assert meta["difficulty"] in ("beginner", "intermediate", "advanced")
    assert set(meta["tasks"]) <= {"text", "multimodal", "omni", "embedding"}
    assert set(meta["hardware"].values()) <= {"verified", "unsupported"}
    assert model["model_id"] == f"{SITE.parent.name}/{SITE.stem}"
    assert WINDOW.contains(model["min_vllm_version"])
    assert model["architecture"] == "moe"
    assert re.fullmatch(r"[\d.]+[BT]", model["parameter_count"])
    assert re.fullmatch(r"[\d.]+[BT]", model["active_parameters"])
    assert isinstance(model["context_length"], int)
    assert set(recipe["opt_in_features"]) <= set(recipe["features"])
    assert recipe["compatible_strategies"] == ["single_node_tp"]
    variant = recipe["variants"]["default"]
    assert variant["precision"] == "mxfp4" and variant["vram_minimum_gb"] == 85
    assert list(variant["hardware_overrides"]) == list(MACHINES)


def test_site_recipe_gives_arguments_as_text() -> None:
    """The site joins them; a bare number or `true` of YAML would not be a word."""
    recipe = load(SITE)
    overrides = recipe["variants"]["default"]["hardware_overrides"].values()
    lists = [recipe["model"]["base_args"], *(feature["args"] for feature in recipe["features"].values())]
    lists += [override["extra_args"] for override in overrides]
    assert all(isinstance(word, str) for words in lists for word in words)
    assert all(isinstance(value, str) for o in overrides for value in o.get("extra_env", {}).values())
    assert all(feature["description"] for feature in recipe["features"].values())


def test_sparkrun_recipe_has_the_fields_of_its_schema() -> None:
    recipe = load(SPARKRUN)
    assert recipe["recipe_version"] == "2"
    assert recipe["model"] == load(SITE)["model"]["model_id"]
    assert (recipe["runtime"], recipe["max_nodes"]) == ("vllm", 1)
    image, _, tag = recipe["container"].partition(":v")
    assert image == "vllm/vllm-openai" and WINDOW.contains(tag)
    assert recipe["executor_config"] == {"entrypoint": ""}
    assert recipe["metadata"]["description"]
    assert all(isinstance(value, str) for value in recipe["env"].values())
    assert f"vllm-ling=={__version__}" in recipe["pre_exec"][0].split()


def test_sparkrun_defaults_and_placeholders_are_the_same_names() -> None:
    """A default without a placeholder would change nothing, and a placeholder without a default stays as text."""
    recipe = load(SPARKRUN)
    assert set(re.findall(r"\{(\w+)\}", recipe["command"])) == {"model", *recipe["defaults"]}
