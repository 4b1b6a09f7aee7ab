# SPDX-License-Identifier: Apache-2.0
"""Result files: summaries by hand, bad input, and the comparison of two of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_ling.cli import app
from vllm_ling.errors import LingError
from vllm_ling.eval.report.result_file import Item, ResultFile, load, make, summarize

SCHEMA = Path("eval/results/schema.json")


def item(name: int, correct: bool | None = True, **more: Any) -> Item:
    fields: dict[str, Any] = {"output_tokens": 11, "ttft_s": 0.5, "latency_s": 1.5, "tpot_ms": 100.0}
    return Item(id=str(name), correct=correct, **(fields | more))


def write(path: Path, items: list[Item], data: str = "abc") -> Path:
    path.write_text(make({"data_sha256": data}, items).model_dump_json())
    return path


def test_summary_by_hand() -> None:
    items = [
        item(0, drafts=4, accepted=6),
        item(1, False, invalid=True, latency_s=2.5, drafts=6, accepted=9),
        item(
            2, None, error="connection reset", output_tokens=None, ttft_s=None, latency_s=None, tpot_ms=None
        ),
        item(3, True, truncated=True),
    ]
    found = summarize(items)
    assert (found.items, found.accuracy, found.invalid, found.truncated) == (4, 2 / 3, 1, 1)
    assert found.transport_errors == 1, "no answer is not a wrong answer"
    assert found.tok_per_s == pytest.approx(30 / 4) and found.accept_length == 2.5
    assert found.ttft_ms == 500 and found.latency_s_mean == pytest.approx(5.5 / 3)
    assert summarize([]).accuracy is None and summarize([]).tok_per_s is None


def test_schema_is_current() -> None:
    assert json.loads(SCHEMA.read_text()) == ResultFile.model_json_schema()


def test_round_trip(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a.json", [item(0), item(1, False)])).summary.accuracy == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("items"), "items: Field required"),
        (lambda d: d["items"][0].update(correct="perhaps"), "items.0.correct"),
        (lambda d: d["items"][0].update(colour="red"), "items.0.colour"),
        (lambda d: d.update(schema_version=7), "schema_version"),
        (lambda d: d["summary"].update(accuracy=0.99), "summary.accuracy is 0.99, but the items give"),
        (lambda d: d["items"].append(d["items"][0]), "'0' is there twice"),
    ],
)
def test_bad_files_name_the_field(tmp_path: Path, change: Any, words: str) -> None:
    path = write(tmp_path / "a.json", [item(0), item(1, False)])
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(LingError, match=words):
        load(path)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"schema')
    for name in ("half.json", "none.json"):
        with pytest.raises(LingError, match=name):
            load(tmp_path / name)


def run(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["eval", "compare", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_compare(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", [item(n, n % 10 != 0, drafts=2, accepted=2) for n in range(400)])
    b = write(
        tmp_path / "b.json",
        [item(n, n % 10 != 0, latency_s=1.0, tpot_ms=50.0, drafts=2, accepted=4) for n in range(401)],
    )
    code, text = run(a, b)
    assert code == 0 and "PASS" in text and "no difference found" in text and "equal" not in text
    assert "tpot_ms: 0.500 times (0.500 to 0.500)" in text and "accept_length: 2.00 and 3.00" in text
    assert "400 items in both, 1 in one only" in text
    worse = write(tmp_path / "c.json", [item(n, n % 2 != 0) for n in range(400)])
    assert run(a, worse)[0] == 2
    few = write(tmp_path / "d.json", [item(n, n != 3) for n in range(12)])
    assert run(few, write(tmp_path / "e.json", [item(n, n != 4) for n in range(12)]))[0] == 1
    found = json.loads(run(a, b, "--json")[1])
    assert found["accuracy"]["p"] == 1.0 and found["unanswered"] == 0


def test_transport_errors_are_left_out_of_the_accuracy(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", [item(n) for n in range(100)])
    b = write(
        tmp_path / "b.json",
        [item(n, None if n < 30 else True, error="x" if n < 30 else None) for n in range(100)],
    )
    code, text = run(a, b, "--margin", "0.05")
    assert code == 0 and "30 without an answer" in text and "100.00% and 100.00%" in text


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", [item(0)])
    for path, words in (
        (write(tmp_path / "b.json", [item(0)], data="other"), "different data"),
        (write(tmp_path / "c.json", [item(9)]), "no item in common"),
    ):
        with pytest.raises(LingError, match=words):
            run(a, path)
    with pytest.raises(LingError, match="--margin 0"):
        run(a, a, "--margin", "0")
