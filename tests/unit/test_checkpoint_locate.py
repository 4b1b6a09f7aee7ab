# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are: bundled, a folder, the Hugging Face cache, or nowhere."""

from pathlib import Path

import pytest

from vllm_ling.checkpoint.locate import resolve_model, tiny_ling_path


def test_tiny_ling_is_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny-ling") == tiny_ling_path()
    assert (tiny_ling_path() / "config.json").is_file()


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-ling").mkdir()
    assert resolve_model("tiny-ling") == Path("tiny-ling")


def test_folders(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "absent")) is None
    (tmp_path / "file").touch()
    assert resolve_model(str(tmp_path / "file")) is None


def test_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--ling"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert resolve_model("some/ling") is None
    (snapshot / "config.json").write_text("{}")
    assert resolve_model("some/ling") is None, "a download without weights is not a model"
    (snapshot / "model.safetensors").touch()
    assert resolve_model("some/ling") == snapshot
    assert resolve_model("some/other") is None


@pytest.mark.parametrize("name", ["a/b/c", "not a repository", "bad--name..", "\0"])
def test_names_that_are_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) is None
