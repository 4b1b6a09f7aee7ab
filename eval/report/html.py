# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling eval report`: result files as one HTML page that needs nothing but itself, and as markdown text."""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_text
from vllm_ling.eval.report import svg
from vllm_ling.eval.report.data import (
    FIGURES,
    Figure,
    Pairing,
    Run,
    figure_rows,
    origin,
    pairing_rows,
    pairings,
    read_runs,
)
from vllm_ling.eval.report.markdown import markdown, sentence
from vllm_ling.eval.report.plots import Plot, plots

# The second line of defence behind escaping: even an injected tag could neither run nor fetch anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

_NONE = "&ndash;"


def _colours(names: Sequence[str]) -> str:
    return " ".join(f"--c{i}: {name};" for i, name in enumerate(names))


_STYLE = f"""
:root {{ color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --ink: #1c2024; --muted: #5c6670; --grid: #e2e5e9; {_colours(svg.LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{
  --page: #101214; --card: #191c20; --ink: #e8eaed; --muted: #a3adb8; --grid: #30363d; {_colours(svg.DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .6rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .5rem; }}
p {{ margin: .4rem 0; }}
h1, h2, h3, p, li, th, summary, dd {{ overflow-wrap: anywhere; }}
.muted, figcaption, .note {{ color: var(--muted); }}
figcaption, .note {{ font-size: .85rem; margin: .5rem 0 0; }}
.card {{ background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: .9rem; }}
.scroll {{ width: fit-content; max-width: 100%; overflow-x: auto; padding: .4rem 0; }}
.plots {{ columns: 27rem 2; column-gap: 1rem; }}
figure {{ margin: 0 0 1rem; break-inside: avoid; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .9rem .3rem 0; text-align: right; vertical-align: top; }}
thead th {{ vertical-align: bottom; }}
thead span {{ display: block; width: max-content; max-width: 14rem; margin-left: auto; }}
tbody tr {{ border-top: 1px solid var(--grid); }}
th:first-child {{ position: sticky; left: 0; background: var(--card); padding-left: .9rem; min-width: 8rem;
  text-align: left; font-weight: normal; }}
td {{ min-width: 5rem; }}
.wide td {{ min-width: 6.5rem; }}
tbody th {{ overflow-wrap: normal; }}
.figures tbody th {{ white-space: nowrap; }}
.legend {{ list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .3rem 0 0;
  font-size: .9rem; }}
.legend li {{ display: flex; align-items: baseline; max-width: 100%; }}
.key {{ flex: none; margin-right: .45rem; }}
details {{ margin: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
dl {{ display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .2rem 1rem; margin: .6rem 0 0;
  font-size: .9rem; }}
dt {{ color: var(--muted); }}
dd {{ margin: 0; min-width: 0; white-space: pre-wrap; }}
@media (max-width: 640px) {{ main {{ padding: 1rem .6rem 2rem; }} .card {{ padding: .7rem; }}
  .scroll {{ padding: .4rem 0; }} th, td {{ padding-right: .6rem; }} th:first-child {{ padding-left: .7rem; }}
  thead span {{ max-width: 9rem; }} td {{ min-width: 4rem; }} table {{ font-size: .9rem; }} }}
{svg.STYLE}
"""


def run(files: Sequence[Path], out: Path, markdown_to: str | None, margin: float) -> None:
    """The command: reads all files, then writes the page and, if asked, the markdown text.

    Raises:
        LingError: an unreadable or a target file, too many files, a margin that is no share.
    """
    if not 0 < margin < 1:
        raise LingError(f"--margin {margin:g}: a share of the items between 0 and 1, such as 0.01")
    if len(files) > svg.MAX_SERIES:
        raise LingError(f"{len(files)} files: the plots can tell {svg.MAX_SERIES} runs apart; give fewer")
    beside = None if markdown_to in (None, "-") else Path(str(markdown_to))
    _refuse_overwriting(files, out, beside)
    runs = read_runs(files)
    pairs = pairings(runs, margin)
    _write("--out", out, page(runs, pairs))
    if beside:
        _write("--markdown", beside, markdown(runs, pairs))
    if markdown_to == "-":
        # Bytes, because stdout may be in an encoding that lacks a label's letters.
        sys.stdout.buffer.write(markdown(runs, pairs).encode())
        sys.stdout.flush()
    else:
        print(f"{out}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}")


def _refuse_overwriting(files: Sequence[Path], out: Path, beside: Path | None) -> None:
    taken = {path.resolve(): str(path) for path in files}
    for option, target in (("--out", out), ("--markdown", beside)):
        if target is None:
            continue
        if target.resolve() in taken:
            raise LingError(
                f"{option} {target}: would overwrite {taken[target.resolve()]}; give another name"
            )
        if target.is_dir():
            raise LingError(f"{option} {target}: a folder; give a file's name")
        taken[target.resolve()] = f"--out {target}"


def _write(option: str, path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise LingError(f"{option} {path}: cannot be written: {error.strerror}") from None


def page(runs: Sequence[Run], pairs: Sequence[Pairing]) -> str:
    """The whole page; the same runs give the same text."""
    title = f"Evaluation report: {', '.join(run.label for run in runs)}"
    sections = [
        f'<h1>Evaluation report</h1>\n<p class="muted">{_counted(runs)}</p>',
        _figures(runs),
        '<h2>Plots</h2>\n<div class="plots">\n'
        + "\n".join(_plot(plot, runs) for plot in plots(runs))
        + "\n</div>",
    ]
    if pairs:
        sections.append(_comparison(runs[0], pairs))
    sections.append("<h2>Origin</h2>\n" + "\n".join(_origin(run) for run in runs))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n'
        "<body>\n<main>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _counted(runs: Sequence[Run]) -> str:
    items = sum(run.file.summary.items for run in runs)
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {items} items in all"


def _figures(runs: Sequence[Run]) -> str:
    rows = [
        (name, [_data(figure, run, cell) for run, cell in zip(runs, cells, strict=True)])
        for figure, (name, cells) in zip(FIGURES, figure_rows(runs), strict=True)
    ]
    return _table("figures", "Figures of the runs", [run.label for run in runs], rows)


def _data(figure: Figure, run: Run, cell: str | None) -> str:
    """A figure with its full precision for whoever reads the page by program."""
    return (
        _NONE if cell is None else f'<data value="{figure.value(run.file.summary)!r}">{escape(cell)}</data>'
    )


def _table(name: str, told: str, labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table with figures as rows and runs as columns, which narrow screens hold better; cells are HTML."""
    head = "".join(f'<th scope="col"><span>{escape(label)}</span></th>' for label in labels)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for row, cells in rows
    )
    return (
        f'<div class="card scroll"><table class="{name}" aria-label="{escape(told)}">\n'
        f'<thead><tr><th scope="col">run</th>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )


def _plot(plot: Plot, runs: Sequence[Run]) -> str:
    head = f'<figure class="card">\n<h3>{escape(plot.title)}</h3>\n'
    note = f'<p class="note">{escape(plot.note)}</p>\n' if plot.note else ""
    if not plot.drawing:
        return f"{head}{note}</figure>"
    keys = "".join(f"<li>{svg.key(i)}{escape(runs[i].label)}</li>" for i in plot.series)
    legend = "" if plot.name == "plot-stages" else f'<ul class="legend">{keys}</ul>\n'
    return f"{head}{plot.drawing}\n{legend}<figcaption>{escape(plot.caption)}</figcaption>\n{note}</figure>"


def _comparison(first: Run, pairs: Sequence[Pairing]) -> str:
    rows = [
        (name, [_NONE if cell is None else escape(cell) for cell in cells])
        for name, cells in pairing_rows(pairs)
    ]
    labels = [pair.run.label for pair in pairs if pair.found is not None]
    told = f"Compared with {first.label}"
    table = _table("wide", told, labels, rows) if rows else ""
    claims = "".join(f"<li>{escape(pair.run.label)}: {escape(sentence(pair))}</li>" for pair in pairs)
    return (
        f"<h2>{escape(told)}</h2>\n<p>Paired by item. Intervals by bootstrap over the items.</p>\n"
        f'{table}\n<ul class="claims">{claims}</ul>'
    )


def _origin(run: Run) -> str:
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{_NONE if words is None else escape(words)}</dd>"
        for name, words in origin(run)
    )
    return f'<details class="card"><summary>{escape(run.label)}</summary><dl>{facts}</dl></details>'
