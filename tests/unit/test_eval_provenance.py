# SPDX-License-Identifier: Apache-2.0
"""Provenance names versions, commit and machine, and gives away neither host nor folders; JSON files are atomic."""

import json
import platform
import subprocess
from pathlib import Path

import pytest

from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import ROOT, git_state, provenance, public, versions


def test_record_is_plain_json_without_host_or_paths() -> None:
    record = provenance(["/opt/somewhere/bin/tool", "--out", "/srv/data/x.json", f"{ROOT}/build/demo.json"])
    text = json.dumps(record)
    assert record["command"] == ["tool", "--out", "x.json", "build/demo.json"]
    assert {"date", "git", "packages", "cpu", "gpus", "python"} <= record.keys()
    assert record["packages"]["torch"] == versions(["torch"])["torch"]
    assert record["cpu"]["cores"] >= 1
    assert str(ROOT) not in text
    assert len(platform.node()) < 4 or platform.node() not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("--out=/var/tmp/x/demo.json", "--out=demo.json"),
        ('{"path": "/var/tmp/model", "ratio": "1/2"}', '{"path": "model", "ratio": "1/2"}'),
        ("relative/path.json", "relative/path.json"),
        ("plain words", "plain words"),
    ],
)
def test_public_cuts_absolute_paths_only(text: str, shown: str) -> None:
    assert public(text) == shown


def test_public_keeps_paths_inside_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert public(f"{tmp_path}/build/x.json") == "build/x.json"


def test_git_state_sees_commit_and_changes(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state["dirty"] is True


def test_json_is_replaced_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    target = tmp_path / "new" / "demo.json"
    write_json(target, {"stage": 1})
    with pytest.raises(TypeError):
        write_json(target, {"stage": object()})
    assert json.loads(target.read_text()) == {"stage": 1}
    assert [path.name for path in target.parent.iterdir()] == ["demo.json"]
