# SPDX-License-Identifier: Apache-2.0
"""The report of runs as markdown text: the tables of the page, and its missing data in words."""

import re
from collections.abc import Sequence

from vllm_ling.eval.report.data import (
    Pairing,
    Run,
    clean,
    decimals,
    figure_rows,
    finite,
    number,
    origin,
    pairing_rows,
    step_text,
    steps,
)


def markdown(runs: Sequence[Run], pairs: Sequence[Pairing]) -> str:
    """The whole text, ending in a newline; what was not measured is "-"."""
    first = runs[0].label
    parts = ["# Evaluation report", _runs_table(runs)]
    if len(runs) > 1:
        parts += ["## TPOT by stage", _stages(runs)]
    parts += ["## Acceptance by draft position", _acceptance(runs)]
    if pairs:
        parts.append(f"## Compared with {escape(first)}")
        rows = pairing_rows(pairs)
        if rows:
            labels = [pair.run.label for pair in pairs if pair.found is not None]
            parts.append(_table(["", *labels], [[name, *cells] for name, cells in rows]))
        parts.append("\n".join(f"- {escape(pair.run.label)}: {escape(sentence(pair))}" for pair in pairs))
    parts.append("## Origin")
    for run in runs:
        known = [f"- {escape(name)}: {escape(words)}" for name, words in origin(run) if words is not None]
        parts.append(f"{escape(run.label)}:\n\n" + "\n".join(known))
    return "\n\n".join(parts) + "\n"


def sentence(pair: Pairing) -> str:
    """What may be claimed of a pair of runs, or why nothing may."""
    if pair.found is None:
        return f"not compared: {pair.problem}"
    accuracy = pair.found["accuracy"]
    return accuracy["sentence"] if accuracy else "accuracy not compared: no item that both runs answered"


def escape(text: str) -> str:
    """The text as markdown that shows it as it is: one line, no tags, no tables, no emphasis, no links."""
    line = " ".join(clean(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore or a tilde inside a word has no meaning, and names are full of them.
    return re.sub(
        r"[\\`*|\[\]]|(?<!\w)[_~]+|[_~]+(?!\w)", lambda found: "".join(f"\\{c}" for c in found[0]), line
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    """A table whose first column is names and the others figures."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    text = [" | ".join(escape(cell) for cell in lines[0]), "|".join(lines[1])]
    text += [" | ".join("-" if cell is None else escape(cell) for cell in row) for row in rows]
    return "\n".join(f"|{line}|" if i == 1 else f"| {line} |" for i, line in enumerate(text))


def _runs_table(runs: Sequence[Run]) -> str:
    rows = figure_rows(runs)
    cells = [[run.label, *(texts[i] for _, texts in rows)] for i, run in enumerate(runs)]
    return _table(["run", *(name for name, _ in rows)], cells)


def _stages(runs: Sequence[Run]) -> str:
    values = [finite(run.file.summary.tpot_ms) for run in runs]
    places = decimals(values)
    changes = [None, *steps(runs)]
    return _table(
        ["stage", "TPOT, ms", "step"],
        [
            [
                run.label,
                None if value is None else number(value, places),
                None if change is None else step_text(change, places),
            ]
            for run, value, change in zip(runs, values, changes, strict=True)
        ],
    )


def _acceptance(runs: Sequence[Run]) -> str:
    shares = {run.label: run.file.summary.acceptance or [] for run in runs}
    deepest = max(map(len, shares.values()))
    if not deepest:
        return "No run has acceptance by position (items.drafts and items.accepted_at)."
    rows: list[list[str | None]] = [
        [label, *(f"{100 * share:.1f}%" for share in found), *[None] * (deepest - len(found))]
        for label, found in shares.items()
    ]
    return _table(["run", *(str(n) for n in range(1, deepest + 1))], rows)
