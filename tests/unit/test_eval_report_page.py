# SPDX-License-Identifier: Apache-2.0
"""The report of runs: its numbers against the summaries, what is missing, hostile text, command line errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.report_runs import PLOTS, STEP_MS, Page, origin, run_items, shows, write_runs
from vllm_ling.cli import app
from vllm_ling.errors import LingError
from vllm_ling.eval.provenance import ROOT
from vllm_ling.eval.report.compare import compare
from vllm_ling.eval.report.data import FIGURES
from vllm_ling.eval.report.result_file import Item, load, make

HOSTILE = "\" onload='x' <script>alert(1)</script>\"'&|`**_[x](javascript:1)"
ATTRIBUTES = set(
    re.findall(
        r"\S+",
        """aria-hidden aria-label charset class content d dy height href http-equiv id lang name rel role scope
        text-anchor transform value viewbox width x y""",
    )
)


def command(*arguments: Any) -> str:
    """`vllm-ling eval report ...`; its standard output."""
    done = CliRunner().invoke(app, ["eval", "report", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def report(folder: Path, *files: Path, more: tuple[str, ...] = ()) -> tuple[str, str]:
    """Page and markdown text of the files."""
    out = folder / "report.html"
    text = command(*files, "--out", out, "--markdown", "-", *more)
    return out.read_text(encoding="utf-8"), text


def write(path: Path, items: list[Item], **provenance: Any) -> Path:
    path.write_text(make(provenance, items).model_dump_json(), encoding="utf-8")
    return path


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Cells of every table, escapes undone where they matter here."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            tables[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


def test_the_numbers_are_those_of_the_summaries(tmp_path: Path) -> None:
    files = write_runs(tmp_path)
    html, text = report(tmp_path, *files)
    page, summaries = Page(html), [load(path).summary for path in files]
    across = page.tables[0]
    assert across[0] == ["run", *STEP_MS]
    down = markdown_tables(text)[0]
    assert [row[0] for row in down[2:]] == list(STEP_MS)
    assert [row[0] for row in across[1:]] == down[0][1:] == [figure.name for figure in FIGURES]
    for n, figure in enumerate(FIGURES, 1):
        for run, summary in enumerate(summaries):
            value = figure.value(summary)
            assert shows(across[n][1 + run], value), (figure.name, value, across[n])
            assert shows(down[2 + run][n], value), (figure.name, value, down[2 + run])
    assert across[-1][1:3] == ["\u2013"] * 2 and down[2][-1] == "-", "no speculation has no accept length"
    # Full precision is there too.
    exact = [figure.value(summary) for figure in FIGURES for summary in summaries]
    assert [float(value) for value in page.values] == [value for value in exact if value is not None]


def test_units_of_the_figures(tmp_path: Path) -> None:
    """By hand: a share in percent, milliseconds that stay milliseconds, seconds that stay seconds."""
    item = Item(id="a", correct=True, output_tokens=11, ttft_s=0.5, latency_s=1.5, tpot_ms=100.0)
    html, _ = report(tmp_path, write(tmp_path / "a.json", [item, item.model_copy(update={"id": "b"})]))
    found = {row[0]: row[1] for row in Page(html).tables[0]}
    assert found == {
        "run": "a",
        "items": "2",
        "accuracy, %": "100.00",
        "invalid": "0",
        "truncated": "0",
        "transport errors": "0",
        "without token counts": "0",
        "tok/s": "10.0",
        "TPOT, ms": "100",
        "TTFT, ms": "500",
        "mean latency, s": "1.50",
        "p95 latency, s": "1.50",
        "accept length": "\u2013",
    }


def test_the_comparison_is_that_of_compare(tmp_path: Path) -> None:
    files = write_runs(tmp_path)
    html, text = report(tmp_path, *files, more=("--margin", "0.05"))
    page = Page(html)
    table = page.tables[1]
    assert (
        table
        == [[re.sub("^$", "run", cell) for cell in row] for row in markdown_tables(text)[3][:1]]
        + (markdown_tables(text)[3][2:])
    )
    assert table[0] == ["run", "head", "mtp"]
    rows = {row[0]: row[1:] for row in table}
    for column, path in enumerate(files[1:]):
        found = compare(files[0], path, 0.05)
        assert rows["items in both"][column] == str(found["items"]) == "200"
        assert rows["without an answer"][column] == str(found["unanswered"])
        assert rows["verdict, margin 5%"][column] == found["accuracy"]["verdict"]
        gap = found["accuracy"]["difference"]
        shown = [float(word) for word in re.findall(r"[+-][\d.]+", rows["difference, points (95%)"][column])]
        assert shown == pytest.approx([100 * gap[name] for name in ("estimate", "low", "high")], abs=0.00501)
        ratio = found["ratios"]["tpot_ms"]
        shown = [float(word) for word in re.findall(r"[\d.]+", rows["TPOT, times the first's (95%)"][column])]
        assert shown == pytest.approx([ratio[name] for name in ("estimate", "low", "high")], abs=0.000501)
        assert found["accuracy"]["sentence"] in page.text and found["accuracy"]["sentence"] in text


def test_the_steps_are_differences_of_tpot(tmp_path: Path) -> None:
    files = write_runs(tmp_path)
    html, text = report(tmp_path, *files)
    tpot = [float(load(path).summary.tpot_ms or 0) for path in files]
    table = markdown_tables(text)[1]
    assert table[2][2] == "-", "the first run has no step"
    for n in (1, 2):
        ms, share = re.fullmatch(r"([+-][\d.]+) ms \(([+-]\d+)%\)", table[2 + n][2]).groups()  # type: ignore[union-attr]
        assert float(ms) == pytest.approx(tpot[n] - tpot[n - 1], abs=0.00501)
        assert float(share) == pytest.approx(100 * (tpot[n] / tpot[n - 1] - 1), abs=0.501)
        assert table[2 + n][2] in Page(html).text
    slower = report(tmp_path, files[2], files[0])[1]
    assert markdown_tables(slower)[1][3][2].startswith("+"), "slower has a plus"


def test_different_data_and_nothing_in_common_are_said(tmp_path: Path) -> None:
    files = write_runs(tmp_path)
    other = write(
        tmp_path / "other.json", run_items("mtp", 20, 1), **(origin("other") | {"data_sha256": "cd"})
    )
    apart = write(
        tmp_path / "apart.json",
        [item.model_copy(update={"id": f"x{item.id}"}) for item in run_items("mtp", 20, 1)],
        **origin("apart"),
    )
    html, text = report(tmp_path, files[0], other, apart, files[1])
    page = Page(html)
    for found in (page.text, text):
        assert "different data" in found and "no item in common" in found
        assert str(tmp_path) not in found, "no path of the machine in a page made to be shown"
    assert page.tables[1][0] == ["run", "head"], "the run that can be compared still is"
    assert "a step is not the effect of one change" in page.text
    # None can be: sentences, and no empty table.
    assert len(Page(report(tmp_path, files[0], other)[0]).tables) == 1
    # One run has nothing to be compared with.
    assert "Compared with" not in report(tmp_path, files[0])[0]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    items = [Item(id=HOSTILE, correct=True, latency_s=1.0, tpot_ms=5.0, output_tokens=3, chunks=[1, 2])]
    provenance = {
        "label": HOSTILE,
        "gpus": [HOSTILE],
        "packages": {HOSTILE: HOSTILE},
        "flags": ["--x", HOSTILE],
        "date": HOSTILE,
        HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: None}]},
        "url": "https://example.org/x.js",
    }
    html, text = report(
        tmp_path,
        write(tmp_path / "<b>a.json", items, **provenance),
        # Left out of every plot, which notes and sentences say by its name.
        write(tmp_path / "b.json", [Item(id="b", correct=True)], **(provenance | {"data_sha256": HOSTILE})),
        write(tmp_path / "c.json", items, **provenance),
    )
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "b", "img", "iframe", "object", "a"}
    assert {name for _, attributes in page.tags for name in attributes} == ATTRIBUTES
    assert page.text.count(HOSTILE) > 30, "shown as it is, in headings, legends, cells and sentences"
    for name, plot in page.plots().items():
        assert "<script>alert(1)</script>" in str(plot["aria-label"]), name
    # In markdown: no tag, no cell border, no emphasis, no link. (Our own tables have no escape in them.)
    assert "<" not in text and "&lt;script&gt;" in text
    assert not re.search(r"(?<!\\)(`|\*\*|\[)", text)
    assert {len(row) for row in markdown_tables(text)[0]} == {1 + len(FIGURES)}


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    html, _ = report(tmp_path, *write_runs(tmp_path, 20))
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style and "@font-face" not in style
    for tag, attributes in Page(html).tags:
        assert tag not in ("script", "img", "iframe", "object", "embed", "use", "image"), tag
        for name in ("src", "srcset", "href", "xlink:href", "data", "action"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
    (policy,) = (a["content"] for _, a in Page(html).tags if a.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")


def test_labels(tmp_path: Path) -> None:
    items = run_items("head", 5, 1)
    labels: list[Any] = ["same", "same", " ", 7, "two\nlines", "same (2)", "half \ud800 sign\x00"]
    files = []
    for n, label in enumerate(labels):
        path = write(tmp_path / f"file{n}.json", items)
        data = json.loads(path.read_text())
        data["provenance"]["label"] = label
        path.write_text(json.dumps(data))
        files.append(path)
    html, _ = report(tmp_path, *files)
    assert Page(html).tables[0][0] == [
        *("run", "same", "same (2)", "file2", "file3", "two lines", "same (2) (2)", "half ? sign\ufffd")
    ]


def test_missing_data_is_a_sentence_instead_of_a_plot(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.json", [Item(id=str(n), correct=n > 1) for n in range(4)])
    html, text = report(tmp_path, bare)
    page = Page(html)
    assert not page.plots()
    for missing in (
        "TPOT (items.tpot_ms)",
        "latency (items.latency_s)",
        "item with both output_tokens and latency_s",
        "acceptance by position (items.drafts and items.accepted_at)",
        "chunks (items.chunks) with tokens after the first",
    ):
        assert f"Nothing to plot: the run has no {missing}." in page.text
    cells = {row[0]: row[1] for row in page.tables[0]}
    for name in ("tok/s", "TPOT, ms", "TTFT, ms", "mean latency, s", "p95 latency, s", "accept length"):
        assert cells[name] == "\u2013", name
    assert "No run has acceptance by position" in text
    # With others beside it the plot stays and the run is named.
    full = write(tmp_path / "full.json", run_items("mtp", 30, 3), label="full")
    page = Page(report(tmp_path, bare, full)[0])
    assert set(page.plots()) == PLOTS
    assert page.text.count("Not shown: bare, with no ") == 5
    # Every figure has a title and words for those who cannot see it.
    for plot in page.plots().values():
        assert "full" in str(plot["aria-label"]) and plot["role"] == "img"
    assert sum(tag == "title" for tag, _ in page.tags) > len(PLOTS)


@pytest.mark.parametrize("empty", ["no items", "only errors", "odd numbers"])
def test_odd_files_make_a_page(tmp_path: Path, empty: str) -> None:
    items = {
        "no items": [],
        "only errors": [Item(id="a", correct=None, error="reset")],
        "odd numbers": [
            Item(id="a", correct=True, latency_s=0.0, tpot_ms=0.0, ttft_s=0.0, output_tokens=0, chunks=[]),
            Item(id="b", correct=True, latency_s=float("inf"), tpot_ms=float("inf"), output_tokens=1),
            Item(id="c", correct=True, latency_s=1e-9, tpot_ms=1e9, output_tokens=10**6, chunks=[-1, 0, 5]),
            Item(id="d", correct=True, drafts=1, accepted=9, accepted_at=[9, -1], chunks=[0, 1, 0, 2]),
        ],
    }[empty]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(make({"git": None, "gpus": []}, items).model_dump()))
    html, text = report(tmp_path, path, path)
    page = Page(html)
    assert "nan" not in page.text.lower() and "None" not in page.text + text
    for tag, attributes in page.tags:
        for name in ("d", "x", "y", "width", "height"):
            assert not re.search("nan|inf", str(attributes.get(name))), (tag, attributes)


def test_items_without_the_data_are_counted(tmp_path: Path) -> None:
    items = run_items("mtp", 30, 3)
    items[:7] = [item.model_copy(update={"latency_s": None, "chunks": None}) for item in items[:7]]
    missing = sum(item.latency_s is None for item in items)
    assert missing >= 7
    page = Page(report(tmp_path, write(tmp_path / "a.json", items))[0])
    assert page.text.count(f"Items without these data: a {missing} of 30.") == 3


def test_origin_is_folded_and_whole(tmp_path: Path) -> None:
    files = write_runs(tmp_path, 10)
    page = Page(report(tmp_path, *files)[0])
    folded = [attributes for tag, attributes in page.tags if tag == "details"]
    assert len(folded) == 3 and all("open" not in attributes for attributes in folded)
    for words in (
        "0123456789abcdef0123456789abcdef01234567 with changes",
        "vllm-ling 0.1.0, vllm 0.33.0, torch 2.11.0",
        "Test GPU, 1024 MiB, 1.2.3",
        "2026-12-01T06:52:10+00:00",
        '--max-num-seqs 1 --additional-config \'{"ling": {"lm_head": "fp8"}}\'',
        "ab" * 32,
    ):
        assert words in page.text, words


def test_same_input_same_bytes(tmp_path: Path) -> None:
    """Also in another process, with other hash seeds."""
    files = write_runs(tmp_path, 40)
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run(
            [
                *(sys.executable, "-m", "vllm_ling.cli", "eval", "report", *map(str, files)),
                *("--out", "r.html", "--markdown", "r.md"),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=120,
        )
        found.append(((folder / "r.html").read_bytes(), (folder / "r.md").read_bytes()))
        assert sorted(path.name for path in folder.iterdir()) == ["r.html", "r.md"]
    assert found[0] == found[1] and all(found[0])


def test_command_line_errors(tmp_path: Path) -> None:
    (a,) = [write(tmp_path / "a.json", run_items("head", 5, 1))]
    kept = a.read_bytes()
    out = tmp_path / "r.html"
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "folder").mkdir()
    for arguments, words in (
        ([tmp_path / "none.json", "--out", out], r"none\.json: not a readable JSON file"),
        ([a, tmp_path / "half.json", "--out", out], r"half\.json: not a readable JSON file"),
        ([a, "--out", a], r"--out .*a\.json: would overwrite .*a\.json"),
        ([a, "--out", out, "--markdown", a], r"--markdown .*a\.json: would overwrite"),
        ([a, "--out", out, "--markdown", out], r"--markdown .*r\.html: would overwrite --out"),
        ([a, "--out", tmp_path / "folder"], r"--out .*folder: a folder"),
        ([a, "--out", a / "r.html"], r"--out .*r\.html: cannot be written"),
        ([a, "--out", out, "--markdown", a / "r.md"], r"--markdown .*r\.md: cannot be written"),
        ([*[a] * 13, "--out", out], "13 files: the plots can tell 12 runs apart"),
        ([a, "--out", out, "--margin", "1"], "--margin 1: a share"),
    ):
        with pytest.raises(LingError, match=words):
            command(*arguments)
        out.unlink(missing_ok=True)
    assert a.read_bytes() == kept
    for missing in ([], [a]):
        assert CliRunner().invoke(app, ["eval", "report", *map(str, missing)]).exit_code == 2
    assert command(a, "--out", tmp_path / "new" / "r.html") == f"{tmp_path / 'new' / 'r.html'}: 1 run\n"
    assert not list((tmp_path / "new").glob(".*")), "no partial file stays"
