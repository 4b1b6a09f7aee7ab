# SPDX-License-Identifier: Apache-2.0
"""Reads the serve and benchmark commands out of recipes and documents, as the tools that use them would."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SITE = ROOT / "recipes/inclusionAI/Ling-3.0-flash-fp4.yaml"
SPARKRUN = ROOT / "recipes/sparkrun/ling-3.0-flash-fp4-vllm-ling.yaml"
README, RECIPES_README = ROOT / "README.md", ROOT / "recipes/README.md"
IMAGE = "vllm-ling"
_START = re.compile(r"(\$ )?([A-Z_0-9]+=\S+ )*(vllm-ling serve|vllm serve|vllm bench serve|docker run) ")


@dataclass(frozen=True)
class Command:
    """A command: where it stands (document and comment above it), the words after `serve`, the variables it sets."""

    where: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    bench: bool = False


def load(path: Path) -> dict[str, Any]:
    """A recipe."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(recipe, dict)
    return recipe


def site_commands(recipe: Mapping[str, Any]) -> dict[str, Command]:
    """GPU -> what the recipes site makes of the default variant: base, variant, GPU, parallelism, features."""
    model, variant = recipe["model"], recipe["variants"]["default"]
    commands = {}
    for gpu, override in variant["hardware_overrides"].items():
        words = [
            model["model_id"],
            *model["base_args"],
            *variant.get("extra_args", ()),
            *override["extra_args"],
        ]
        words += ["--tensor-parallel-size", str(variant["tp"])]
        for name, feature in recipe["features"].items():
            words += () if name in recipe["opt_in_features"] else feature["args"]
        env = {**model["base_env"], **override.get("extra_env", {})}
        commands[gpu] = Command(f"site:{gpu}", tuple(words), env)
    return commands


def sparkrun_command(recipe: Mapping[str, Any]) -> Command:
    """The command template with its placeholders filled in; other braces are JSON and stay."""
    values = {**recipe["defaults"], "model": recipe["model"]}
    text = re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), recipe["command"])
    program, serve, *words = shlex.split(text.replace("\\\n", " "))
    assert (program, serve) == ("vllm-ling", "serve")
    return Command("sparkrun", tuple(words), recipe["env"])


def documented_commands(where: str, markdown: str) -> list[Command]:
    """The serve, docker run and vllm bench serve commands in a document's fences."""
    found = []
    for fence in re.findall(r"^ *```\w*\n(.*?)^ *```", markdown, flags=re.DOTALL | re.MULTILINE):
        title, lines = "", iter(fence.splitlines())
        for line in map(str.strip, lines):
            if line.startswith("# "):
                title = re.split("[;:(]", line[2:])[0].strip()
            if _START.match(line):
                while line.endswith("\\"):
                    line = line[:-1] + " " + next(lines).strip()
                command = _command(f"{where}:{title}", line.removeprefix("$ "))
                again = sum(other.where.partition(" #")[0] == command.where for other in found)
                found.append(replace(command, where=f"{command.where} #{again + 1}") if again else command)
    return found


def _command(where: str, line: str) -> Command:
    words = shlex.split(line, comments=True)
    env = {}
    while "=" in words[0]:
        name, _, env[name] = words.pop(0).partition("=")
    if words[:2] == ["docker", "run"]:
        image = words.index(IMAGE)
        env |= dict(words[at + 1].split("=", 1) for at in range(image) if words[at] == "-e")
        return Command(where, tuple(words[image + 1 :]), env)
    if words[1] == "bench":
        return Command(f"{where}bench", tuple(words[3:]), env, bench=True)
    return Command(where, tuple(words[2:]), env)
