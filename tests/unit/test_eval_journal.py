# SPDX-License-Identifier: Apache-2.0
"""Journals: nothing finished is lost, nothing foreign is continued."""

import json
from pathlib import Path

import pytest

from vllm_ling.errors import LingError
from vllm_ling.eval.journal import Journal

SETTINGS = {"model": "m", "limit": None, "sampling": {"temperature": 0.0}}


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j"
    with Journal(path, SETTINGS) as journal:
        journal.add({"id": "0", "text": "a"})
        journal.add({"id": "1", "error": "gone"})
    with Journal(path, SETTINGS) as journal:
        assert set(journal.entries) == {"0", "1"}
        journal.add({"id": "1", "text": "b"})
    with Journal(path, SETTINGS) as journal:
        assert journal.entries["1"] == {"id": "1", "text": "b"}, "the later line counts"
        journal.finish(tmp_path / "answers")
    assert not path.exists() and len((tmp_path / "answers").read_text().splitlines()) == 4


@pytest.mark.parametrize("cut", [1, 7, 17])
def test_a_line_cut_by_a_crash_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    with Journal(path, SETTINGS) as journal:
        journal.add({"id": "0", "text": "a"})
        journal.add({"id": "1", "text": "b"})
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, SETTINGS) as journal:
        assert set(journal.entries) == {"0"}
        journal.add({"id": "1", "text": "again"})
    with Journal(path, SETTINGS) as journal:
        assert journal.entries["1"]["text"] == "again"


def test_other_settings_are_refused_by_name_and_restart_throws_away(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, SETTINGS) as journal:
        journal.add({"id": "0"})
    with pytest.raises(LingError, match=r"limit = None, now 5.*--restart"):
        Journal(path, {**SETTINGS, "limit": 5})
    with Journal(path, {**SETTINGS, "limit": 5}, restart=True) as journal:
        assert journal.entries == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json\n", "line 1 is not readable"),
        (b'{"other": 1}\n', "not a journal"),
        (b"[1]\n", "line 1 is not readable"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(LingError, match=said):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content, "and left alone"


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(json.dumps({"settings": SETTINGS}) + "\n{half\n" + '{"id": "1"}\n')
    with pytest.raises(LingError, match="line 2 is not readable"):
        Journal(path, SETTINGS)


def test_two_runs_cannot_write_to_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", SETTINGS), pytest.raises(LingError, match="another run"):
        Journal(tmp_path / "j", SETTINGS)
