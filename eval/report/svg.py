# SPDX-License-Identifier: Apache-2.0
"""Numbers to SVG text: axes with round ticks, lines, steps, marks and bars. Knows nothing of runs or files."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 320
_RIGHT, _TOP, _BOTTOM = 24, 14, 58
COLOURS, SHAPES = 6, 4
# Colour and shape (of marks and of dashes) both change from one series to the next, with different periods.
MAX_SERIES = math.lcm(COLOURS, SHAPES)

Points = Sequence[tuple[float, float]]

# Told apart by eyes without red, green or blue cones, and at least 3:1 against the background of either mode.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#c02ae0", "#3d1a05", "#696969")
DARK = ("#56b4e9", "#ff9046", "#00b07a", "#b565ea", "#f5ec6a", "#ffffff")

STYLE = (
    """
.plot { display: block; width: 100%; height: auto; overflow: visible; }
.plot text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.plot .muted { fill: var(--muted); }
.plot .halo { paint-order: stroke; stroke: var(--card); stroke-width: 4; stroke-linejoin: round; }
.plot .grid { stroke: var(--grid); stroke-width: 1; fill: none; }
.plot .axis { stroke: var(--muted); stroke-width: 1; fill: none; }
.line { stroke: var(--c); stroke-width: 2; fill: none; stroke-linejoin: round; }
.mark { fill: var(--c); stroke: var(--c); stroke-width: 1.5; }
.mark.hollow { fill: var(--card); }
.cloud { fill: var(--c); fill-opacity: .6; }
.bar { fill: var(--c); }
.step { fill: var(--muted); fill-opacity: .55; }
.link { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 2 3; fill: none; }
.line.s1 { stroke-dasharray: 7 4; }
.line.s2 { stroke-dasharray: 2 3; }
.line.s3 { stroke-dasharray: 9 3 2 3; }
@media (max-width: 640px) { .plot text { font-size: 16px; } }
"""
    + "".join(f".c{i} {{ --c: var(--c{i}); }}\n" for i in range(COLOURS))
).strip()

# A file of its own has no page around it to set the colours.
_ALONE = (
    ".plot { --page: #fff; --card: #fff; --ink: #1c2024; --muted: #5c6670; --grid: #e2e5e9; background: #fff; "
    + " ".join(f"--c{i}: {colour};" for i, colour in enumerate(LIGHT))
    + " }\n"
    + STYLE
)


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high` with round ticks; the title names the unit."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]


def axis(title: str, values: Iterable[float], whole: bool = False, count: int = 5) -> Axis:
    """An axis that holds zero and all `values`.

    Args:
        values: finite numbers, may be empty.
        whole: ticks at whole numbers only.
        count: roughly how many ticks.
    """
    known = [0.0, *values]
    low, high = min(known), max(known)
    if high - low < 1e-12:
        high = low + 1
    step = _round_step((high - low) / count)
    if whole:
        step = max(1.0, step)
    first = math.floor(round(low / step, 6))
    last = max(first + 1, math.ceil(round(high / step, 6)))
    return Axis(title, first * step, last * step, tuple(n * step for n in range(first, last + 1)))


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


@dataclass(frozen=True)
class Frame:
    """The rectangle between two axes, in the units of the view box."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float

    def px(self, value: float) -> float:
        """Where `value` lies on the x axis."""
        return self.left + (value - self.x.low) / (self.x.high - self.x.low) * (self.right - self.left)

    def py(self, value: float) -> float:
        """Where `value` lies on the y axis; larger values lie higher."""
        return self.bottom - (value - self.y.low) / (self.y.high - self.y.low) * (self.bottom - self.top)


def frame(x: Axis, y: Axis) -> Frame:
    """A frame with room for the tick labels of both axes."""
    left = 34 + 9 * max(len(_tick(value)) for value in y.ticks)
    right = max(_RIGHT, 5 * len(_tick(x.ticks[-1])))
    return Frame(x, y, left, WIDTH - right, _TOP, HEIGHT - _BOTTOM)


def plot(name: str, description: str, inside: Frame, body: Iterable[str]) -> str:
    """A whole drawing: both axes, then `body` (SVG text) over them.

    Args:
        name: id of the element.
        description: what a reader who cannot see the plot is told.
    """
    parts = [*x_axis(inside)]
    for value in inside.y.ticks:
        y = inside.py(value)
        parts.append(f'<path class="grid" d="M{_n(inside.left)} {_n(y)}H{_n(inside.right)}"/>')
        parts.append(text(inside.left - 8, y, _tick(value), "tick-y", "end", shift=True))
    parts.append(f'<path class="axis" d="M{_n(inside.left)} {_n(inside.top)}V{_n(inside.bottom)}"/>')
    middle = (inside.top + inside.bottom) / 2
    parts.append(
        f'<text class="title-y" text-anchor="middle" transform="translate(16 {_n(middle)}) rotate(-90)">'
        f"{escape(inside.y.title)}</text>"
    )
    return svg(name, description, HEIGHT, [*parts, *body])


def svg(name: str, description: str, height: float, body: Iterable[str]) -> str:
    """The outer element, `WIDTH` wide."""
    return (
        f'<svg class="plot" id="{escape(name)}" viewBox="0 0 {WIDTH} {_n(height)}" role="img" '
        f'aria-label="{escape(description)}">\n<title>{escape(description)}</title>\n'
        + "\n".join(body)
        + "\n</svg>"
    )


def alone(drawing: str) -> str:
    """What `svg` or `plot` made as a file of its own."""
    head, _, rest = drawing.partition("\n")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{head}\n<style>{_ALONE}</style>\n{rest}\n"


def x_axis(inside: Frame) -> list[str]:
    """The x axis under a frame: grid, tick labels, title."""
    parts = []
    for value in inside.x.ticks:
        x = inside.px(value)
        parts.append(f'<path class="grid" d="M{_n(x)} {_n(inside.top)}V{_n(inside.bottom)}"/>')
        parts.append(text(x, inside.bottom + 19, _tick(value), "tick-x", "middle"))
    parts.append(f'<path class="axis" d="M{_n(inside.left)} {_n(inside.bottom)}H{_n(inside.right)}"/>')
    middle = (inside.left + inside.right) / 2
    parts.append(text(middle, inside.bottom + 45, inside.x.title, "title-x", "middle"))
    return parts


def text(x: float, y: float, words: str, css: str, anchor: str = "start", shift: bool = False) -> str:
    """A line of text on the baseline `y`, or with `shift` centred on it."""
    lower = ' dy=".35em"' if shift else ""
    return f'<text class="{css}" x="{_n(x)}" y="{_n(y)}"{lower} text-anchor="{anchor}">{escape(words)}</text>'


def line(inside: Frame, points: Points, series: int) -> str:
    """A line through the points."""
    d = "L".join(f"{_n(inside.px(x))} {_n(inside.py(y))}" for x, y in points)
    return f'<path class="line {look(series)}" d="M{d}"/>'


def cumulative(inside: Frame, values: Sequence[float], series: int) -> str:
    """The share of `values` (percent on the y axis) that is at most x, as steps up to the right end of the axis."""
    ordered = sorted(values)
    d = [f"M{_n(inside.px(inside.x.low))} {_n(inside.py(0))}"]
    for rank, value in enumerate(ordered, 1):
        # Only the last of equal values, so that the steps are as many as the values that differ.
        if rank == len(ordered) or ordered[rank] != value:
            d.append(f"H{_n(inside.px(value))}V{_n(inside.py(100 * rank / len(ordered)))}")
    return f'<path class="line {look(series)}" d="{"".join(d)}H{_n(inside.right)}"/>'


def mark(inside: Frame, x: float, y: float, series: int, tip: str, hollow: bool = False) -> str:
    """A mark at one point with a text that shows on hovering."""
    css = f"mark {'hollow ' if hollow else ''}{look(series)}"
    at = f"M{_n(inside.px(x))} {_n(inside.py(y))}"
    return f'<path class="{css}" d="{at}{_shape(series, 4)}"><title>{escape(tip)}</title></path>'


def cloud(inside: Frame, points: Points, series: int) -> str:
    """A mark at every point, as one element; points that fall on the same pixels are drawn once."""
    at = dict.fromkeys((_n(inside.px(x)), _n(inside.py(y))) for x, y in points)
    d = "".join(f"M{x} {y}{_shape(series, 3)}" for x, y in at)
    return f'<path class="cloud {look(series)}" d="{d}"/>'


def bar(inside: Frame, low: float, high: float, y: float, height: float, css: str, tip: str) -> str:
    """A horizontal bar from `low` to `high` on the x axis, `y` and `height` in pixels."""
    left, right = inside.px(low), inside.px(high)
    # A step of nothing is still there to be seen.
    width = max(right - left, 1)
    return (
        f'<rect class="{css}" x="{_n(left)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def link(inside: Frame, x: float, top: float, bottom: float) -> str:
    """A thin vertical line at `x` that leads the eye from one bar to the next."""
    return f'<path class="link" d="M{_n(inside.px(x))} {_n(top)}V{_n(bottom)}"/>'


def key(series: int) -> str:
    """A small picture of a series for a legend."""
    return (
        '<svg class="key" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
        f'<path class="line {look(series)}" d="M1 6H33"/>'
        f'<path class="mark {look(series)}" d="M17 6{_shape(series, 4)}"/></svg>'
    )


def look(series: int) -> str:
    """CSS classes of a series' colour and dashes."""
    return f"c{series % COLOURS} s{series % SHAPES}"


def _shape(series: int, r: int) -> str:
    """Circle, square, triangle or diamond around the present point of a path."""
    return (
        f"m{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        f"m{-r} {-r}h{2 * r}v{2 * r}h{-2 * r}z",
        f"m0 {-r}l{r} {2 * r}h{-2 * r}z",
        f"m0 {-r - 1}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z",
    )[series % SHAPES]


def _tick(value: float) -> str:
    return f"{value + 0:.6g}"


def _n(pixels: float) -> str:
    """A coordinate to a tenth of a pixel, without trailing zeros and without -0."""
    return f"{round(pixels, 1) + 0:g}"
