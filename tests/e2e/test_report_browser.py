# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: its plots, its text, both colour schemes, and no word to anybody else."""

import itertools
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e import browser as chromium
from tests.unit.report_runs import PLOTS, Page, run_items, shows, write_runs
from vllm_ling.eval.report import html, svg
from vllm_ling.eval.report.data import FIGURES
from vllm_ling.eval.report.result_file import load, make

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
GROUND = {False: (0xF4, 0xF5, 0xF7), True: (0x10, 0x12, 0x14)}


@pytest.fixture(scope="module")
def browser() -> str:
    return chromium.find()


def report(folder: Path, files: list[Path]) -> Path:
    page = folder / "report.html"
    html.run(files, page, None, 0.01)
    return page


def test_the_probe_sees_console_and_requests(browser: str, tmp_path: Path) -> None:
    """Otherwise the silence of the other tests would prove nothing."""
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><title>bad</title><img src="http://example.invalid/a.png">'
        '<link rel="stylesheet" href="https://example.invalid/b.css"><script>missing()</script>'
    )
    seen = chromium.visit(browser, page, 800)
    assert any("missing is not defined" in line for line in seen.console)
    assert any("http://example.invalid/a.png" in line for line in seen.requests)
    assert any("example.invalid:443" in line for line in seen.requests)


def test_the_page_in_a_browser(browser: str, tmp_path: Path) -> None:
    files = write_runs(tmp_path)
    seen = chromium.visit(browser, report(tmp_path, files), 1200)
    assert seen.console == [] and seen.requests == []
    # The browser writes void elements its own way; the text is what counts.
    page = Page(seen.dom)
    assert set(page.plots()) == PLOTS
    for row, figure in zip(page.tables[0][1:], FIGURES, strict=True):
        for cell, path in zip(row[1:], files, strict=True):
            assert shows(cell, figure.value(load(path).summary)), (figure.name, row)


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("sample", ["three runs", "twelve runs"])
def test_layout(browser: str, tmp_path: Path, width: int, sample: str) -> None:
    files = write_runs(tmp_path)
    if sample == "twelve runs":
        long = (
            "a label of many words that no table or legend was made for, and_one_word_of_forty_letters_in_it"
        )
        for n in range(9):
            files.append(tmp_path / f"more{n}.json")
            items = run_items("mtp", 40, n)
            slower = [i.model_copy(update={"tpot_ms": i.tpot_ms and i.tpot_ms * (1 + n % 4)}) for i in items]
            files[-1].write_text(make({"label": f"{long} {n}"}, slower).model_dump_json())
    found, seen = chromium.measure(browser, report(tmp_path, files), width)
    assert seen.console == [] and seen.requests == []
    assert found["inner"] == width
    assert found["page"] <= width, "the page itself scrolls sideways"
    assert set(found["plots"]) == PLOTS
    for name, plot in found["plots"].items():
        left, top, right, bottom = plot["box"]
        assert right - left > 0.85 * min(width, 550) - 50 and bottom - top > 120, (name, plot["box"])
        card = plot["card"]
        assert len(plot["texts"]) > 6
        for words, (x0, y0, x1, y1) in plot["texts"]:
            assert x0 >= card[0] and x1 <= card[2] and y0 >= card[1] and y1 <= card[3], (name, words)
        for (one, a), (other, b) in itertools.combinations(plot["texts"], 2):
            # A pixel, because the boxes hold room for letters that are not there.
            apart = a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 3 or b[3] <= a[1] + 3
            assert apart, (name, one, other)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 400])
def test_screenshot(browser: str, tmp_path: Path, width: int, dark: bool) -> None:
    shot = tmp_path / "shot.png"
    chromium.visit(browser, report(tmp_path, write_runs(tmp_path)), width, shot, dark)
    with Image.open(shot) as picture:
        assert picture.width == width
        counts = {colour: n for n, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert max(counts, key=lambda colour: counts[colour]) != (0, 0, 0)
    assert counts.get(GROUND[dark], 0) > 10_000 and not counts.get(GROUND[not dark])
    for colour in (svg.DARK if dark else svg.LIGHT)[:3]:
        rgb = tuple(bytes.fromhex(colour[1:]))
        assert counts.get(rgb, 0) > 500, f"no bar in {colour}"


def test_hostile_labels_do_nothing(browser: str, tmp_path: Path) -> None:
    code = "document.title='owned'"
    attack = f'<img src=http://example.invalid/x onerror="{code}"><script>{code}</script>'
    files = write_runs(tmp_path, 20)
    for path in files:
        data = json.loads(path.read_text())
        data["provenance"] |= {"label": f"\"'>{attack}", "date": attack, attack: {attack: attack}}
        path.write_text(json.dumps(data))
    page = report(tmp_path, files)
    page.write_text(chromium.without_policy(page.read_text(encoding="utf-8")), encoding="utf-8")
    seen = chromium.visit(browser, page, 1200)
    assert seen.console == [] and seen.requests == []
    assert "<title>owned" not in seen.dom and "<title>Evaluation report" in seen.dom
    assert attack in Page(seen.dom).text


def test_a_missing_browser_fails_in_ci_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="Debian package `chromium`"):
        chromium.find()
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match="Debian package `chromium`"):
        chromium.find()
