# SPDX-License-Identifier: Apache-2.0
"""Journals: nothing finished is lost, nothing foreign is continued."""

import json
import resource
from pathlib import Path

import pytest

from vllm_ling.errors import LingError
from vllm_ling.eval.runs.journal import Journal, beside

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
        journal.finish(tmp_path / "run.json")
    assert not path.exists() and len((tmp_path / "run.answers.jsonl").read_text().splitlines()) == 4


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
        (b"no line feed in it", "not a journal"),
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


@pytest.mark.parametrize("kept", [0, 5, 14, 30])
def test_a_crash_within_the_first_line_leaves_a_journal_to_begin_with(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "j"
    path.write_bytes(json.dumps({"settings": SETTINGS}).encode()[:kept])
    with Journal(path, SETTINGS) as journal:
        journal.add({"id": "0"})
    with Journal(path, SETTINGS) as journal:
        assert set(journal.entries) == {"0"}


def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path: Path) -> None:
    """The limit on a file's size stands for the full disk: part of the line is written, then comes the error."""
    path = tmp_path / "j"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, SETTINGS) as journal:
        journal.add({"id": "0", "text": "a"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(LingError, match=r"j: File too large; .* the same command goes on"):
                journal.add({"id": "1", "text": "b" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert set(journal.entries) == {"0"}
        journal.add({"id": "2", "text": "c"})
    with Journal(path, SETTINGS) as journal:
        assert set(journal.entries) == {"0", "2"}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LingError, match=r"file/j: .*choose another --out"):
        Journal(tmp_path / "file" / "j", SETTINGS)


def test_files_beside_a_result_keep_its_whole_name() -> None:
    """Results named after versions must not share their answers."""
    assert beside(Path("a/ling-3.0"), ".log") == Path("a/ling-3.0.log")
    assert beside(Path("a/ling-3.0.json"), ".log") == Path("a/ling-3.0.log")
