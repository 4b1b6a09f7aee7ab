# SPDX-License-Identifier: Apache-2.0
"""The drawings: a value lies where the axis says, curves are those of the data, colours can be told apart."""

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report_runs import run_items
from vllm_ling.eval.report import plots, svg
from vllm_ling.eval.report.data import Run
from vllm_ling.eval.report.result_file import Item, make

# Half a tenth of a pixel is lost in writing a coordinate, the same again in reading the axis.
PIXEL = 0.25


def made(label: str, items: list[Item]) -> Run:
    return Run(label, Path(f"{label}.json"), make({"label": label}, items))


def item(name: int, **more: object) -> Item:
    return Item.model_validate({"id": str(name), "correct": True, **more})


class Drawing:
    """A drawing with its axes read back from the tick labels."""

    def __init__(self, text: str) -> None:
        self.root = ET.fromstring(text)
        _, _, self.width, self.height = map(float, self.root.attrib["viewBox"].split())

    def ticks(self, name: str) -> list[tuple[float, float]]:
        """(value, pixel) of every tick of the axis "x" or "y"."""
        found = [e for e in self.root.iter("text") if e.get("class") == f"tick-{name}"]
        return [(float(e.text or ""), float(e.attrib[name])) for e in found]

    def pixel(self, name: str, value: float) -> float:
        """Where the labels say that the value lies."""
        (v0, p0), *_, (v1, p1) = self.ticks(name)
        return p0 + (value - v0) / (v1 - v0) * (p1 - p0)

    def paths(self, css: str) -> list[str]:
        return [e.attrib["d"] for e in self.root.iter("path") if css in e.get("class", "").split()]

    def titles(self, name: str) -> str:
        (found,) = [e.text for e in self.root.iter("text") if e.get("class") == f"title-{name}"]
        return found or ""


def starts(d: str) -> list[tuple[float, float]]:
    """The absolute points of a path's M and L commands."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


def corners(d: str) -> list[tuple[float, float]]:
    """The points of a path of M, H and V commands."""
    found: list[tuple[float, float]] = []
    for command, first, second in re.findall(r"([MHV])(-?[\d.]+)(?: (-?[\d.]+))?", d):
        x, y = found[-1] if found else (0.0, 0.0)
        found.append((float(first), float(second) if second else y) if command != "V" else (x, float(first)))
    return found


def test_marks_lie_where_the_axes_say() -> None:
    values = [(12, 0.7), (300, 21.0), (151, 9.25)]
    run = made("a", [item(n, output_tokens=x, latency_s=y) for n, (x, y) in enumerate(values)])
    drawing = Drawing(plots.tokens_and_latency([run]).drawing)
    (cloud,) = drawing.paths("cloud")
    expected = [(drawing.pixel("x", x), drawing.pixel("y", y)) for x, y in values]
    for found, wanted in zip(starts(cloud), expected, strict=True):
        assert found == pytest.approx(wanted, abs=PIXEL)
    assert (drawing.titles("x"), drawing.titles("y")) == ("output tokens", "latency, s")


def test_the_latency_curve_is_the_cumulative_distribution() -> None:
    latencies = [4.0, 1.0, 2.0, 2.0, 3.5]
    plot = plots.latency([made("a", [item(n, latency_s=v) for n, v in enumerate(latencies)])])
    drawing = Drawing(plot.drawing)
    (line,) = drawing.paths("line")
    points = corners(line)
    for value, share in ((1.0, 20), (2.0, 60), (3.5, 80), (4.0, 100)):
        wanted = (drawing.pixel("x", value), drawing.pixel("y", share))
        assert any(math.dist(point, wanted) < 2 * PIXEL for point in points), (value, share)
    assert points[0] == pytest.approx((drawing.pixel("x", 0), drawing.pixel("y", 0)), abs=PIXEL)
    ((x, y),) = (starts(d)[0] for d in drawing.paths("mark"))
    assert (x, y) == pytest.approx((drawing.pixel("x", 4.0), drawing.pixel("y", 100)), abs=PIXEL), "p95"
    assert (drawing.titles("x"), drawing.titles("y")) == ("latency, s", "items answered, %")


def test_acceptance_by_position() -> None:
    run = made("a", [item(0, drafts=8, accepted=11, accepted_at=[6, 4, 1])])
    drawing = Drawing(plots.by_position([made("none", [item(0)]), run]).drawing)
    (line,) = drawing.paths("line")
    wanted = [
        (drawing.pixel("x", n), drawing.pixel("y", share)) for n, share in ((1, 75), (2, 50), (3, 12.5))
    ]
    for found, point in zip(starts(line), wanted, strict=True):
        assert found == pytest.approx(point, abs=PIXEL)
    assert [value for value, _ in drawing.ticks("x")] == [1, 2, 3]
    assert "s1" in str([e.get("class") for e in drawing.root.iter("path")]), "the second run keeps its look"


def test_rounds_start_after_the_first_chunk() -> None:
    assert plots.item_rounds(item(0, chunks=[1, 4, 3, 0, 4])) == [(1, 4), (5, 3), (8, 4)]
    assert plots.item_rounds(item(0, chunks=[9])) == []
    assert plots.item_rounds(item(0, chunks=[1, -2, 3])) == []
    assert plots.item_rounds(item(0)) == []
    assert plots.bin_means([(0, 4), (9, 2), (10, 1), (35, 3)], 10) == [
        (5, 3, 2),
        (15, 1, 1),
        (35, 3, 1),
    ]


def test_tokens_per_round_over_the_output() -> None:
    """Four tokens a round up to position 50, two after it."""
    chunks = [1] + [4] * 12 + [1] + [2] * 25
    assert sum(chunks[:14]) == 50 and sum(chunks) == 100
    run = made("a", [item(n, chunks=chunks) for n in range(30)])
    drawing = Drawing(plots.over_output([run]).drawing)
    (line,) = drawing.paths("line")
    points = starts(line)
    assert points[0][1] == pytest.approx(drawing.pixel("y", 4), abs=PIXEL)
    assert points[-1][1] == pytest.approx(drawing.pixel("y", 2), abs=PIXEL)
    change = drawing.pixel("x", 50)
    assert all(y == pytest.approx(drawing.pixel("y", 2), abs=PIXEL) for x, y in points if x > change)
    assert drawing.titles("x") == "output position, tokens"
    assert not drawing.paths("hollow")
    few = Drawing(plots.over_output([made("a", [item(0, chunks=[1, 2, 3])])]).drawing)
    assert few.paths("hollow"), "few rounds are marked as such"


def test_the_waterfall() -> None:
    tpot = (60.0, 44.0, None, 8.0, 10.0)
    runs = [made(f"r{n}", [item(0, tpot_ms=value)]) for n, value in enumerate(tpot)]
    plot = plots.stages(runs)
    drawing = Drawing(plot.drawing)
    rects = {name: [] for name in ("bar", "step")}  # type: dict[str, list[tuple[float, float, float]]]
    for e in drawing.root.iter("rect"):
        left, width = float(e.attrib["x"]), float(e.attrib["width"])
        rects[e.attrib["class"].split()[0]].append((left, left + width, float(e.attrib["y"])))
    at = {value: drawing.pixel("x", value) for value in (0, 60, 44, 8, 10)}
    wide = [(left, right) for left, right, _ in rects["bar"]]
    for found, value in zip(wide, (60, 44, 8, 10), strict=True):
        assert found == pytest.approx((at[0], at[value]), abs=PIXEL)
    steps = [(left, right) for left, right, _ in rects["step"]]
    for found, (low, high) in zip(steps, ((44, 60), (8, 10)), strict=True):
        assert found == pytest.approx((at[low], at[high]), abs=2 * PIXEL), (
            "no step to or from a missing figure"
        )
    words = [e.text or "" for e in drawing.root.iter("text")]
    assert {"-16.00 ms (-27%)", "+2.00 ms (+25%)", "not measured", "60.00 ms"} <= set(words)
    assert "Not shown: r2" in plot.note
    tops = [y for *_, y in rects["bar"]]
    assert tops == sorted(tops), "in the order given"


@given(st.lists(st.floats(-1e6, 1e9), max_size=5), st.booleans(), st.integers(2, 8))
def test_axes_hold_their_values_between_round_ticks(values: list[float], whole: bool, count: int) -> None:
    found = svg.axis("x", values, whole, count)
    assert 2 <= len(found.ticks) <= count + 3
    room = 1e-5 * (found.high - found.low)
    assert all(found.low - room <= value <= found.high + room for value in [0.0, *values])
    assert found.ticks[0] == found.low and found.ticks[-1] == found.high
    labels = [f"{tick + 0:.6g}" for tick in found.ticks]
    assert len(set(labels)) == len(labels), "each tick has a label of its own"
    if whole:
        assert all(tick == round(tick) for tick in found.ticks)


def test_drawings_are_small_for_many_items() -> None:
    run = made("a", [item(n, output_tokens=n % 50, latency_s=1.0 + n % 7) for n in range(20_000)])
    assert len(plots.tokens_and_latency([run]).drawing) < 50_000, "points on one pixel are drawn once"
    assert len(plots.latency([run]).drawing) < 10_000


def test_text_is_escaped_in_drawings() -> None:
    run = made("<b>&\"'", run_items("mtp", 20, 1))
    for plot in plots.plots([run]):
        words = "".join(ET.fromstring(plot.drawing).itertext())
        assert "<b>&\"'" in words and "<b>" not in plot.drawing


def _linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def _luminance(rgb: list[float]) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def _lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, c)) for c in rgb)
    scaled = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        _luminance([r, g, b]),
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


# Machado, Oliveira, Fernandes 2009: full protanopia, deuteranopia, tritanopia, on linear RGB.
_EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}


@pytest.mark.parametrize("eyes", _EYES)
@pytest.mark.parametrize(("colours", "ground"), [(svg.LIGHT, "#ffffff"), (svg.DARK, "#191c20")])
def test_colours_can_be_told_apart(eyes: str, colours: tuple[str, ...], ground: str) -> None:
    seen = [
        _lab([sum(a * b for a, b in zip(row, _linear(c), strict=True)) for row in _EYES[eyes]])
        for c in colours
    ]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) > 10
    for colour in colours:
        dark, light = sorted((_luminance(_linear(colour)), _luminance(_linear(ground))))
        assert (light + 0.05) / (dark + 0.05) >= 3, f"{colour} on {ground}"


def test_every_series_has_a_look_of_its_own() -> None:
    assert len({svg.look(n) for n in range(svg.MAX_SERIES)}) == svg.MAX_SERIES == 12
