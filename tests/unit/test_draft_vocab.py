# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary: its file, counting by hand, the command's errors, and the published study."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.cli import app
from vllm_ling.errors import LingError
from vllm_ling.eval.studies.draft_vocab_study import FLASH_VOCAB, solve
from vllm_ling.roofline.bytes import accept_length
from vllm_ling.serve import _plain_look, preflight
from vllm_ling.spec_decode.count_tokens import most_frequent, run
from vllm_ling.spec_decode.draft_vocab import MIN_ROWS, DraftVocab, load_draft_vocab, tokenizer_hash
from vllm_ling.spec_decode.text_files import read_texts

RESULT = Path("eval/results/draft-vocab.json")
IDS = list(range(3, 13))


def saved(folder: Path, **changes: Any) -> Path:
    """A sound file for a vocabulary of 100, with changes."""
    path = folder / "list.json"
    DraftVocab(100, "sha256:abc", IDS, {"tokens": 5}).save(path)
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return path


def test_round_trip(tmp_path: Path) -> None:
    vocab = load_draft_vocab(saved(tmp_path, ids=IDS[::-1]), 100, "sha256:abc")
    assert vocab == DraftVocab(100, "sha256:abc", IDS, {"tokens": 5})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 99}, "vocabulary of 99, but the model's vocab_size is 100"),
        ({"tokenizer": "sha256:abd"}, "another tokenizer"),
        ({"ids": [*IDS, 100]}, "100 is no token id between 0 and 99"),
        ({"ids": [*IDS, -1]}, "-1 is no token id"),
        ({"ids": [*IDS, 7.5]}, "7.5 is no token id"),
        ({"ids": [*IDS, True]}, "True is no token id"),
        ({"ids": [*IDS, "7"]}, "'7' is no token id"),
        ({"ids": [*IDS, 5]}, "token id 5 is listed twice"),
        ({"ids": IDS[: MIN_ROWS - 1]}, "too few rows: 7"),
        ({"ids": None}, "'ids' is missing"),
        ({"counted": []}, "'counted' is missing or no dict"),
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "not a draft vocabulary"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(LingError, match=words) as caught:
        load_draft_vocab(path, 100, "sha256:abc")
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "not json", "[1]"])
def test_unreadable_files_are_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "list.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LingError, match=f"{path}: "):
        load_draft_vocab(path, 100)


def test_tokenizer_hash_is_of_the_tokens_and_not_of_the_layout(tmp_path: Path) -> None:
    data = json.loads((tiny_ling_path() / "tokenizer.json").read_text())
    copy = tmp_path / "tokenizer.json"
    copy.write_text(json.dumps(data, indent=4))
    assert tokenizer_hash(tmp_path) == tokenizer_hash(tiny_ling_path())
    data["added_tokens"][1]["content"] = "<|other|>"
    copy.write_text(json.dumps(data))
    assert tokenizer_hash(tmp_path) != tokenizer_hash(tiny_ling_path())
    copy.write_text("{}")
    with pytest.raises(LingError, match="not a tokenizer"):
        tokenizer_hash(tmp_path)
    assert tokenizer_hash(tmp_path / "nowhere") is tokenizer_hash(None) is None


def test_counted_by_hand(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_ling_path() / "tokenizer.json"))
    one, two, seven = (tokenizer.token_to_id(digit) for digit in "127")
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("777777\n")
    lines.write_text(
        '{"question": "111", "answer": "22"}\n\n{"messages": [{"role": "user", "content": "1"}]}\n'
    )
    run("tiny-ling", [plain, lines], 9, tmp_path / "new" / "list.json")
    vocab = load_draft_vocab(tmp_path / "new" / "list.json", 1024, tokenizer_hash(tiny_ling_path()))
    newline = tokenizer.token_to_id("Ċ")
    # Five special tokens in any case, then 7 (six times), 1 (four), 2 (two), and the line end (once).
    assert vocab.ids == sorted([*range(5), one, two, seven, newline])
    assert vocab.counted == {
        "model": "tiny-ling",
        "files": [{"name": "a.txt", "bytes": 7, "tokens": 7}, {"name": "b.jsonl", "bytes": 86, "tokens": 6}],
        "tokens": 13,
        "covered": 1.0,
    }
    run("tiny-ling", [plain, lines], 8, tmp_path / "8.json")
    assert load_draft_vocab(tmp_path / "8.json", 1024).counted["covered"] == round(12 / 13, 6)


def test_most_frequent() -> None:
    counts = {5: 3, 6: 9, 7: 3, 8: 1}
    assert most_frequent(counts, 3, set(), 20) == [5, 6, 7]
    assert most_frequent(counts, 2, set(), 20) == [5, 6], "the lower of two equally frequent"
    assert most_frequent(counts, 2, {19}, 20) == [6, 19], "kept whatever its count"
    assert most_frequent(counts, 6, set(), 20) == [0, 1, 5, 6, 7, 8], "filled up from below"


def test_large_text_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "".join(f"line {i} äöü\r\n" for i in range(20_000)) + "x" * 200_000
    path.write_bytes(text.encode())
    pieces = list(read_texts(path))
    assert len(pieces) > 3 and "".join(text for _, texts in pieces for text in texts) == text
    assert sum(size for size, _ in pieces) == path.stat().st_size


def test_fields_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    parts = [{"type": "text", "text": "d"}, {"type": "image_url", "image_url": {}}]
    rows = [
        {"text": "a", "id": 1},
        {"prompt": "b", "messages": [{"content": "c"}, {"content": parts}, {"content": None}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [texts for _, texts in read_texts(path)] == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', "a.jsonl, line 2: expected an object with one of"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: 5 where text"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: not UTF-8"),
        ("a.txt", b"", "hold no text"),
        ("a.json", b"{}", "a.json: JSON would be counted"),
        ("a.txt", None, "a.txt: no such file"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LingError, match=words):
        run("tiny-ling", [path], 64, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("model", "rows", "words"),
    [
        ("tiny-ling", 2000, "--rows 2000: expected 8 to 1024"),
        ("tiny-ling", 7, "--rows 7: expected 8"),
        ("no-such-model", 64, "no-such-model: neither a folder"),
        (".", 64, "no tokenizer.json"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, model: str, rows: int, words: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("text")
    with pytest.raises(LingError, match=words):
        run(model, [text], rows, tmp_path / "out.json")


def test_command(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out.json"
    text.write_text("Tom has 3 apples.")
    command = [
        "draft-vocab",
        "tiny-ling",
        "--from",
        str(text),
        "--from",
        str(text),
        "--rows",
        "64",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert len(load_draft_vocab(out, 1024).counted["files"]) == 2


@pytest.mark.usefixtures("plugin_on")
def test_serve_refuses_a_bad_list_before_anything_is_loaded(tmp_path: Path) -> None:
    options = json.dumps({"ling": {"draft_vocab": str(saved(tmp_path))}})
    with pytest.raises(LingError, match=r"list\.json: made for a vocabulary of 100"):
        preflight(_plain_look(["tiny-ling", "--additional-config", options]))


@pytest.fixture
def plugin_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LING_DISABLE", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_solve() -> None:
    assert solve(lambda x: x**2, 0.25) == pytest.approx(0.5)


def test_published_study() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    for name in ("held_out", "hard"):
        full, *short = (row for row in rows if row["set"] == name)
        assert full["draft_rows"] == FLASH_VOCAB and full["bytes_per_token_saved"] == 0
        assert {8192, 16384, 32768} <= {row["draft_rows"] for row in short}
        for row in short:
            # FP8 rows of 2560 values and a scale that three draft steps no longer read.
            assert row["bytes_saved_per_round"] == pytest.approx(3 * 2564 * (FLASH_VOCAB - row["draft_rows"]))
            assert 0 <= row["accept_length_lost"] < 0.2
    for row in (row for row in rows if row["set"] == "break_even"):
        assert row["accept_length"] == pytest.approx(accept_length(row["acceptance"], 3))
        assert accept_length(row["break_even_acceptance"], 3) == pytest.approx(
            row["break_even_accept_length"]
        )
        assert row["break_even_accept_length"] == pytest.approx(
            row["accept_length"] * (1 - row["round_saved"])
        )
