# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, as far as it can be tested without a registry: what it copies is what the wheel needs, no more."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.unit.recipe_files import ROOT, SITE, load
from vllm_ling.compat import SUPPORTED_VLLM

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("vllm_ling", "quant", "spec_decode", "eval")


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, arguments) of a Dockerfile's instructions, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves `path` out: the last pattern that fits it or a folder above it decides."""
    parts = path.split("/")
    places = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    result = False
    for pattern in patterns:
        expression = re.escape(pattern.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(expression, place) for place in places):
            result = not pattern.startswith("!")
    return result


def context(root: Path) -> list[str]:
    """The files and links that a build of `root` sends; links are not followed."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    found = []
    for folder in (".", *FOLDERS):
        for path in (root / folder).glob("*" if folder == "." else "**/*"):
            name = str(path.relative_to(root))
            if (path.is_symlink() or path.is_file()) and not ignored(name, patterns):
                found.append(name)
    return found


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the COPY instructions of the first stage put there."""
    folder = tmp_path_factory.mktemp("image")
    sent = context(ROOT)
    for name, arguments in DOCKERFILE:
        if name != "COPY":
            continue
        *sources, target = arguments.split()
        for source in sources:
            files = [file for file in sent if file == source or file.startswith(f"{source}/")]
            assert files, f"COPY {source}: nothing of it is sent"
            for file in files:
                # A folder's contents go into the target, a file goes under its own name.
                place = folder / target / (Path(file).relative_to(source) if file != source else file)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, place, follow_symlinks=False)
    return folder


def test_only_sources_are_copied(copied: Path) -> None:
    tops = {path.name for path in copied.iterdir()}
    assert tops == {*FOLDERS, "pyproject.toml", "README.md", "LICENSE"}
    assert not (copied / "eval/results").exists()
    assert list(copied.rglob("__pycache__")) == []
    assert (copied / "vllm_ling/quant").is_symlink()


def test_the_wheel_from_the_copies_is_complete(copied: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=copied,
        check=True,
        capture_output=True,
    )
    (wheel,) = (copied / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    suffixes = {".py", *(pattern.removeprefix("*") for pattern in patterns)}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    names = [str(path.relative_to(ROOT)) for path in files]
    wanted = {name if name.startswith("vllm_ling/") else f"vllm_ling/{name}" for name in names}
    assert packed == {name for name in wanted if not name.startswith("vllm_ling/eval/results/")}


def test_the_base_is_a_supported_vllm_of_both_stages() -> None:
    (default,) = (value for name, value in DOCKERFILE if name == "ARG")
    image, _, tag = default.removeprefix("VLLM_IMAGE=").partition(":v")
    assert image == "vllm/vllm-openai"
    assert SpecifierSet(SUPPORTED_VLLM).contains(tag)
    extra = Requirement(PROJECT["project"]["optional-dependencies"]["cuda"][0])
    assert extra.specifier.contains(tag)
    assert [value.split()[0] for name, value in DOCKERFILE if name == "FROM"] == ["${VLLM_IMAGE}"] * 2


def test_pip_cannot_change_what_the_image_has() -> None:
    """Lower bounds alone: a dependency that is there is never replaced by an older one."""
    bounds = [bound for line in PROJECT["project"]["dependencies"] for bound in Requirement(line).specifier]
    assert {bound.operator for bound in bounds} == {">="}


def test_the_entry_point_is_a_script_of_the_project() -> None:
    (entry,) = (json.loads(value) for name, value in DOCKERFILE if name == "ENTRYPOINT")
    assert entry == ["vllm-ling", "serve"]
    assert entry[0] in PROJECT["project"]["scripts"]
    assert load(SITE)["model"]["docker_image"] == entry[0]


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("quant/jit.py", False),
        ("vllm_ling/tiny/model/config.json", False),
        ("README.md", False),
        (".git/config", True),
        ("tests/unit/test_docker_image.py", True),
        ("eval/results/cpu-demo.json", True),
        ("eval/__pycache__/client.cpython-312.pyc", True),
        ("recipes/README.md", True),
    ],
)
def test_dockerignore(path: str, out: bool) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored(path, [line for line in lines if line and not line.startswith("#")]) is out
