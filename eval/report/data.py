# SPDX-License-Identifier: Apache-2.0
"""What a report of runs says, before it is a page or a text: labels, figures, comparisons, origin."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.provenance import public
from vllm_ling.eval.report.compare import compare
from vllm_ling.eval.report.result_file import ResultFile, Summary, load

Row = tuple[str, list[str | None]]


@dataclass(frozen=True)
class Run:
    """A result file and the name it goes by in the report."""

    label: str
    path: Path
    file: ResultFile


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Loads the files; labels are `provenance.label` or the file's stem, made unique by a number.

    Raises:
        LingError: a file that cannot be read.
    """
    runs: list[Run] = []
    for path in paths:
        file = load(path)
        wanted = file.provenance.get("label")
        label = " ".join(clean(wanted).split()) if isinstance(wanted, str) else ""
        label = label or clean(path.stem)
        taken, number, name = {run.label for run in runs}, 2, label
        while name in taken:
            name, number = f"{label} ({number})", number + 1
        runs.append(Run(name, path, file))
    return runs


def clean(text: str) -> str:
    """The text without what no UTF-8 file can hold (lone surrogates) and without control characters."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(
        sign if sign in "\n\t" or sign.isprintable() or sign.isspace() else "\ufffd" for sign in whole
    )


@dataclass(frozen=True)
class Figure:
    """A row of the table of runs: the field of `Summary` times `scale`; `decimals` None fits them to the values."""

    name: str
    field: str
    scale: float = 1.0
    decimals: int | None = None

    def value(self, summary: Summary) -> float | None:
        """The figure in the unit that its name gives."""
        found = getattr(summary, self.field)
        return None if found is None else found * self.scale


FIGURES = (
    Figure("items", "items", decimals=0),
    Figure("accuracy, %", "accuracy", scale=100, decimals=2),
    Figure("invalid", "invalid", decimals=0),
    Figure("truncated", "truncated", decimals=0),
    Figure("transport errors", "transport_errors", decimals=0),
    Figure("without token counts", "unmeasured", decimals=0),
    Figure("tok/s", "tok_per_s"),
    Figure("TPOT, ms", "tpot_ms"),
    Figure("TTFT, ms", "ttft_ms"),
    Figure("mean latency, s", "latency_s_mean"),
    Figure("p95 latency, s", "latency_s_p95"),
    Figure("accept length", "accept_length"),
)


def figure_rows(runs: Sequence[Run]) -> list[Row]:
    """Each figure of `FIGURES` with its text for every run; None where nothing was measured."""
    rows = []
    for figure in FIGURES:
        values = [figure.value(run.file.summary) for run in runs]
        digits = decimals(values) if figure.decimals is None else figure.decimals
        rows.append((figure.name, [None if value is None else number(value, digits) for value in values]))
    return rows


def decimals(values: Sequence[float | None]) -> int:
    """Decimal places that leave three significant digits to the smallest of the values (zero aside)."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    return max(0, 2 - math.floor(math.log10(min(sizes)))) if sizes else 0


def number(value: float, places: int) -> str:
    """With `places` decimals; very small or large numbers with an exponent, so that none is shown as zero."""
    if value and (places > 6 or abs(value) >= 1e9):
        return f"{value:.3g}"
    return f"{value:.{places}f}"


@dataclass(frozen=True)
class Pairing:
    """A run compared with the first: what `compare` found, or the sentence why it cannot."""

    run: Run
    found: dict[str, Any] | None
    problem: str = ""


def pairings(runs: Sequence[Run], margin: float) -> list[Pairing]:
    """Every run but the first, compared with the first."""
    pairs = []
    for run in runs[1:]:
        try:
            pairs.append(Pairing(run, compare(runs[0].path, run.path, margin)))
        except LingError as error:
            pairs.append(Pairing(run, None, clean(public(str(error)))))
    return pairs


def pairing_rows(pairs: Sequence[Pairing]) -> list[Row]:
    """The comparisons that could be made, one column each."""
    columns = [_pairing_column(pair.found) for pair in pairs if pair.found is not None]
    if not columns:
        return []
    return [(name, [column[name] for column in columns]) for name in columns[0]]


def _pairing_column(found: dict[str, Any]) -> dict[str, str | None]:
    accuracy, margin = found["accuracy"], found["margin"]
    column: dict[str, str | None] = {
        "items in both": str(found["items"]),
        "items in one only": str(found["unpaired"]),
        "without an answer": str(found["unanswered"]),
    }
    verdict = f"verdict, margin {100 * margin:g}%"
    names = ("accuracy, %", "difference, points (95%)", "McNemar exact p", verdict)
    column |= dict.fromkeys(names)
    if accuracy:
        first, second = accuracy["accuracy"]
        gap = accuracy["difference"]
        column["accuracy, %"] = f"{100 * first:.2f} and {100 * second:.2f}"
        column["difference, points (95%)"] = (
            f"{100 * gap['estimate']:+.2f} ({100 * gap['low']:+.2f} to {100 * gap['high']:+.2f})"
        )
        column["McNemar exact p"] = f"{accuracy['p']:.3g}"
        column[verdict] = accuracy["verdict"]
    for name, words in (("tpot_ms", "TPOT"), ("ttft_s", "TTFT"), ("latency_s", "latency")):
        ratio = found["ratios"][name]
        known = ratio and all(map(math.isfinite, ratio.values()))
        column[f"{words}, times the first's (95%)"] = (
            f"{ratio['estimate']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if known else None
        )
    return column


def steps(runs: Sequence[Run]) -> list[tuple[float, float] | None]:
    """Change of TPOT from each run to the next, as (ms, share of the former); None where either has no TPOT."""
    values = [finite(run.file.summary.tpot_ms) for run in runs]
    return [
        None if a is None or b is None else (b - a, (b - a) / a if a else math.nan)
        for a, b in pairwise(values)
    ]


def step_text(step: tuple[float, float], places: int) -> str:
    """A step in words, such as "-16.1 ms (-27%)"."""
    ms, share = step
    return f"{ms:+.{places}f} ms" + ("" if math.isnan(share) else f" ({share:+.0%})")


def finite(value: float | None) -> float | None:
    """The value, or None for infinities, which no plot can hold."""
    return value if value is not None and math.isfinite(value) else None


def mixed_data(runs: Sequence[Run]) -> bool:
    """Whether the runs are about different data, by their `provenance.data_sha256`."""
    return len({json.dumps(run.file.provenance.get("data_sha256"), sort_keys=True) for run in runs}) > 1


def origin(run: Run) -> list[tuple[str, str | None]]:
    """Where a run comes from: date, commit, GPUs, versions, flags, then all else that its file says."""
    left = dict(run.file.provenance)
    left.pop("label", None)
    git, gpus = left.pop("git", None), left.pop("gpus", None)
    commit = git.get("commit") if isinstance(git, dict) else git
    changed = isinstance(git, dict) and bool(git.get("dirty"))
    rows = [
        ("file", run.path.name),
        ("date", _words(left.pop("date", None))),
        ("commit", f"{_words(commit)} with changes" if commit and changed else _words(commit)),
        ("GPU", "none" if gpus == [] else _words(gpus)),
        ("versions", _words(left.pop("packages", None))),
        ("flags", _words(left.pop("flags", None))),
    ]
    rows += [(name, _words(value)) for name, value in left.items()]
    return [(clean(name), None if words is None else clean(words)) for name, words in rows]


def _words(value: Any) -> str | None:
    """Plain JSON data as one readable line; None stays None."""
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        # A list of names is read best as a list, a command or flags as what one would type.
        flags = any(word.startswith("-") for word in value)
        return shlex.join(value) if flags else ", ".join(value)
    if (
        isinstance(value, dict)
        and value
        and not any(isinstance(inner, dict | list) for inner in value.values())
    ):
        return ", ".join(f"{name} {'-' if inner is None else inner}" for name, inner in value.items())
    return json.dumps(value, ensure_ascii=False)
