# SPDX-License-Identifier: Apache-2.0
"""The plots of a report: what is drawn from which field, and the sentence that stands where it is missing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ling.eval.report import svg
from vllm_ling.eval.report.data import Run, decimals, finite, mixed_data, number, step_text, steps
from vllm_ling.eval.report.result_file import Item, percentile

# Means over fewer rounds than this are drawn hollow: they say little.
FEW_ROUNDS = 20


@dataclass(frozen=True)
class Plot:
    """A figure of the page. Without data `drawing` is empty and `note` says what is missing.

    Attributes:
        series: numbers of the runs that are drawn, for the legend.
        note: which runs are left out, and why; may be empty.
    """

    name: str
    title: str
    caption: str
    drawing: str
    series: list[int]
    note: str = ""


def plots(runs: Sequence[Run]) -> list[Plot]:
    """All plots, in the order of the page."""
    return [stages(runs), latency(runs), tokens_and_latency(runs), by_position(runs), over_output(runs)]


def stages(runs: Sequence[Run]) -> Plot:
    """The waterfall: TPOT of each run in the order given, and the step from one to the next."""
    name, title = "plot-stages", "TPOT by stage"
    caption = (
        "Mean time per output token of each run in the order given, and the step from one run to the next."
    )
    values = [finite(run.file.summary.tpot_ms) for run in runs]
    shown = [i for i, value in enumerate(values) if value is not None]
    note = _left_out(runs, shown, "no TPOT (items.tpot_ms)")
    if not shown:
        return Plot(name, title, "", "", [], note)
    if mixed_data(runs):
        note = f"The runs are about different data, so a step is not the effect of one change. {note}".strip()
    places = decimals(values)
    x = svg.axis("TPOT, ms", [value for value in values if value is not None])
    height = 44 * len(runs) + 36 * (len(runs) - 1)
    inside = svg.Frame(x, svg.axis("", []), 20, svg.WIDTH - 24, 6, 6 + height)
    body, top = svg.x_axis(inside), inside.top
    changes = [*steps(runs), None]
    for i, (run, value, change) in enumerate(zip(runs, values, changes, strict=True)):
        label = run.label if len(run.label) <= 30 else f"{run.label[:29]}\u2026"
        body.append(svg.text(inside.left + 4, top + 17, label, "name halo"))
        amount = "not measured" if value is None else f"{number(value, places)} ms"
        body.append(svg.text(inside.right, top + 17, amount, "value halo", "end"))
        if value is not None:
            tip = f"{run.label}: {amount}"
            body.append(svg.bar(inside, 0, value, top + 23, 15, f"bar {svg.look(i)}", tip))
        top += 44
        if change is not None and value is not None:
            after = value + change[0]
            words = step_text(change, places)
            body.append(svg.link(inside, value, top - 6, top + 20))
            body.append(svg.link(inside, after, top + 20, top + 59))
            # Beside the link, on the side that has room for some twenty letters.
            at = inside.px(value)
            at, anchor = (at - 7, "end") if at - inside.left > 190 else (at + 7, "start")
            body.append(svg.text(at, top + 13, words, "muted halo", anchor))
            tip = f"{run.label} to {runs[i + 1].label}: {words}"
            body.append(svg.bar(inside, min(value, after), max(value, after), top + 20, 9, "step", tip))
        top += 36
    told = ", ".join(
        f"{run.label} {number(value, places)} ms"
        for run, value in zip(runs, values, strict=True)
        if value is not None
    )
    drawing = svg.svg(name, f"{title}: {told}", inside.bottom + 58, body)
    return Plot(name, title, caption, drawing, shown, note)


def latency(runs: Sequence[Run]) -> Plot:
    """Cumulative distribution of latency, all runs overlaid."""
    name, title = "plot-latency", "Latency distribution"
    values = [[v for item in run.file.items if (v := finite(item.latency_s)) is not None] for run in runs]
    shown = [i for i, found in enumerate(values) if found]
    note = _left_out(runs, shown, "no latency (items.latency_s)", list(map(len, values)))
    if not shown:
        return Plot(name, title, "", "", [], note)
    x = svg.axis("latency, s", [v for found in values for v in found])
    inside = svg.frame(x, svg.axis("items answered, %", [100.0]))
    body, told = [svg.cumulative(inside, values[i], i) for i in shown], []
    for i in shown:
        p95 = percentile(values[i], 0.95) or 0.0
        words = f"{runs[i].label}: 95% within {number(p95, decimals([p95]))} s"
        reached = 100 * sum(v <= p95 for v in values[i]) / len(values[i])
        body.append(svg.mark(inside, p95, reached, i, words))
        told.append(words)
    caption = "Share of the answered items whose latency is at most x. Marks: 95th percentile."
    drawing = svg.plot(name, f"{title}. {'; '.join(told)}", inside, body)
    return Plot(name, title, caption, drawing, shown, note)


def tokens_and_latency(runs: Sequence[Run]) -> Plot:
    """Output tokens against latency, a mark for every item."""
    name, title = "plot-tokens", "Output tokens and latency"
    points = [
        [
            (float(item.output_tokens), item.latency_s)
            for item in run.file.items
            if item.output_tokens is not None and item.latency_s is not None and math.isfinite(item.latency_s)
        ]
        for run in runs
    ]
    shown = [i for i, found in enumerate(points) if found]
    note = _left_out(runs, shown, "no item with both output_tokens and latency_s", list(map(len, points)))
    if not shown:
        return Plot(name, title, "", "", [], note)
    x = svg.axis("output tokens", [x for found in points for x, _ in found], whole=True)
    inside = svg.frame(x, svg.axis("latency, s", [y for found in points for _, y in found]))
    told = "; ".join(f"{runs[i].label}: {len(points[i])} items" for i in shown)
    drawing = svg.plot(name, f"{title}. {told}", inside, [svg.cloud(inside, points[i], i) for i in shown])
    caption = (
        "One mark for every item; the slope is the time per token, the height at 0 the time to the first."
    )
    return Plot(name, title, caption, drawing, shown, note)


def by_position(runs: Sequence[Run]) -> Plot:
    """Acceptance of draft position 1, 2, ..., k."""
    name, title = "plot-acceptance", "Acceptance by draft position"
    shares = [[100 * share for share in run.file.summary.acceptance or []] for run in runs]
    shown = [i for i, found in enumerate(shares) if found]
    note = _left_out(runs, shown, "no acceptance by position (items.drafts and items.accepted_at)")
    if not shown:
        return Plot(name, title, "", "", [], note)
    deepest = max(map(len, shares))
    x = svg.Axis("draft position", 0.5, deepest + 0.5, tuple(map(float, range(1, deepest + 1))))
    inside = svg.frame(
        x, svg.axis("rounds that accept it, %", [100.0, *(v for found in shares for v in found)])
    )
    body = [svg.line(inside, [*enumerate(shares[i], 1)], i) for i in shown]
    for i in shown:
        for position, share in enumerate(shares[i], 1):
            tip = f"{runs[i].label}, position {position}: {share:.1f}%"
            body.append(svg.mark(inside, position, share, i, tip))
    told = "; ".join(f"{runs[i].label}: {', '.join(f'{v:.1f}%' for v in shares[i])}" for i in shown)
    caption = (
        "Share of all rounds that accepted draft token 1, 2, ..., k; a token counts only if all before it do."
    )
    drawing = svg.plot(name, f"{title}. {told}", inside, body)
    return Plot(name, title, caption, drawing, shown, note)


def over_output(runs: Sequence[Run]) -> Plot:
    """Mean tokens of a round, in bins of the output position at which the round starts."""
    name, title = "plot-output", "Tokens per round over the output"
    rounds = [[found for item in run.file.items for found in item_rounds(item)] for run in runs]
    shown = [i for i, found in enumerate(rounds) if found]
    have = [sum(bool(item_rounds(item)) for item in run.file.items) for run in runs]
    note = _left_out(runs, shown, "no chunks (items.chunks) with tokens after the first", have)
    if not shown:
        return Plot(name, title, "", "", [], note)
    last = max(start for found in rounds for start, _ in found)
    # The axis' own ticks at half their distance: some ten bins with round limits.
    ticks = svg.axis("output position, tokens", [last + 1.0], whole=True)
    width = max(1.0, (ticks.ticks[1] - ticks.ticks[0]) / 2)
    binned = {i: bin_means(rounds[i], width) for i in shown}
    inside = svg.frame(
        ticks, svg.axis("tokens per round", [m for means in binned.values() for _, m, _ in means])
    )
    body, told = [], []
    for i, means in binned.items():
        body.append(svg.line(inside, [(middle, mean) for middle, mean, _ in means], i))
        for middle, mean, count in means:
            where = f"positions {middle - width / 2:g} to {middle + width / 2:g}"
            tip = f"{runs[i].label}, {where}: {mean:.2f} tokens per round ({count} rounds)"
            body.append(svg.mark(inside, middle, mean, i, tip, hollow=count < FEW_ROUNDS))
        overall = sum(tokens for _, tokens in rounds[i]) / len(rounds[i])
        told.append(f"{runs[i].label}: {overall:.2f} tokens per round in {len(rounds[i])} rounds")
    caption = (
        f"Mean tokens of a streamed chunk after the first, in bins of {width:g} positions; with speculation a chunk is "
        f"a round. Hollow: fewer than {FEW_ROUNDS} rounds."
    )
    drawing = svg.plot(name, f"{title}. {'; '.join(told)}", inside, body)
    return Plot(name, title, caption, drawing, shown, note)


def item_rounds(item: Item) -> list[tuple[int, int]]:
    """(tokens before it, tokens of it) for every round of an item.

    The first chunk comes from the prompt's pass, before any draft: it moves the position and is no round. Chunks
    without tokens are none either; an item with a negative one has no rounds.
    """
    chunks = item.chunks or []
    if any(tokens < 0 for tokens in chunks):
        return []
    found, position = [], 0
    for number_of, tokens in enumerate(tokens for tokens in chunks if tokens):
        if number_of:
            found.append((position, tokens))
        position += tokens
    return found


def bin_means(rounds: Sequence[tuple[int, int]], width: float) -> list[tuple[float, float, int]]:
    """(middle of the bin, mean tokens of its rounds, rounds) for every bin that has a round, in order."""
    bins: dict[int, list[int]] = {}
    for start, tokens in rounds:
        bins.setdefault(int(start // width), []).append(tokens)
    return [((n + 0.5) * width, sum(found) / len(found), len(found)) for n, found in sorted(bins.items())]


def _left_out(runs: Sequence[Run], shown: Sequence[int], missing: str, have: Sequence[int] = ()) -> str:
    """The sentences about what a plot cannot show: whole runs, and items of runs (`have`: items shown of each)."""
    absent = [run.label for i, run in enumerate(runs) if i not in shown]
    if absent and not shown:
        return f"Nothing to plot: {'the run has' if len(runs) == 1 else 'the runs have'} {missing}."
    notes = [f"Not shown: {', '.join(absent)}, with {missing}."] if absent else []
    if have:
        part = [
            f"{runs[i].label} {len(runs[i].file.items) - have[i]} of {len(runs[i].file.items)}"
            for i in shown
            if have[i] < len(runs[i].file.items)
        ]
        notes += [f"Items without these data: {', '.join(part)}."] if part else []
    return " ".join(notes)
