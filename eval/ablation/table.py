# SPDX-License-Identifier: Apache-2.0
"""The table of an ablation, and the gap between what a synthetic load promised and what real text gave."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vllm_ling.eval.ablation.gap import Gain, Load, explain_gap, gain
from vllm_ling.eval.ablation.run import StageFiles
from vllm_ling.eval.report.compare import paired_accuracy
from vllm_ling.eval.report.result_file import ResultFile
from vllm_ling.eval.report.statistics import Comparison

_CAUSES = {
    "accept_length": "accept length",
    "step_time": "step time",
    "fixed_time": "fixed time",
    "output_length": "output length",
}


@dataclass(frozen=True)
class Row:
    """One stage. Gains are ratios of mean latency to the first stage's; `accuracy` compares with it, item by item."""

    name: str
    real: ResultFile
    synthetic_tok_per_s: float | None
    synthetic_spread: tuple[float, float] | None
    real_gain: Gain | None
    synthetic_gain: Gain | None
    accuracy: Comparison | None
    failed: int = 0


def rows(stages: Sequence[StageFiles], margin: float) -> list[Row]:
    """The table's rows; the first stage is what the others are compared with."""
    base = stages[0]
    return [
        Row(
            name=stage.stage.name,
            real=stage.gsm8k,
            synthetic_tok_per_s=median(speeds) if (speeds := _speeds(stage)) else None,
            synthetic_spread=(min(speeds), max(speeds)) if speeds else None,
            real_gain=paired_gain([base.gsm8k], [stage.gsm8k]),
            synthetic_gain=paired_gain(base.synthetic, stage.synthetic),
            accuracy=None if stage is base else paired_accuracy(base.gsm8k.items, stage.gsm8k.items, margin),
            failed=sum(file.summary.transport_errors for file in (stage.gsm8k, *stage.synthetic)),
        )
        for stage in stages
    ]


def markdown(found: Sequence[Row], what: str, margin: float) -> str:
    """The table and the gap lines. `what` names the synthetic load, `margin` is that of `rows`."""
    task = found[0].real.provenance.get("workload")
    headings = ["stage", f"{task} tok/s", "TPOT ms", "latency s, mean", "p95", "accept length (positions)"]
    headings += ["accuracy"]
    headings += [f"{what} tok/s (spread)", "gain real", "gain synthetic"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "--:|" * (len(headings) - 1)]
    for row in found:
        s = row.real.summary
        spread = row.synthetic_spread
        cells = [
            row.name,
            _figure(s.tok_per_s, ".1f"),
            _figure(s.tpot_ms, ".2f"),
            _figure(s.latency_s_mean, ".2f"),
            _figure(s.latency_s_p95, ".2f"),
            _figure(s.accept_length, ".2f") + _positions(row.real),
            _figure(s.accuracy, ".2%"),
            _figure(row.synthetic_tok_per_s, ".1f")
            + (f" ({spread[0]:.1f} to {spread[1]:.1f})" if spread else ""),
            _percent(row.real_gain),
            _percent(row.synthetic_gain),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [line for row in found[1:] if (line := gap_line(row))]
    lines += [
        f"{row.name}: accuracy {row.accuracy.verdict} against {found[0].name}, margin {margin:.2%}: "
        f"{row.accuracy.sentence}"
        for row in found[1:]
        if row.accuracy
    ]
    lines += [
        f"{row.name}: {row.failed} requests failed; they are in no figure" for row in found if row.failed
    ]
    return "\n".join(lines) + "\n"


def gap_line(row: Row) -> str | None:
    """What the synthetic load promised, what real text gave, and the factor that each cause puts between the two."""
    if row.real_gain is None or row.synthetic_gain is None:
        return None
    promised, given = _percent(row.synthetic_gain), _percent(row.real_gain)
    factors = explain_gap(row.synthetic_gain, row.real_gain)
    why = ", ".join(f"{cause} x{factors[name]:.2f}" for name, cause in _CAUSES.items())
    return (
        f"{row.name}: gap: the synthetic load promised {promised}, real text gave {given}: "
        f"x{factors['total']:.2f} = {why}"
    )


def as_data(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain JSON data."""
    return [
        {
            "name": row.name,
            "failed": row.failed,
            "gsm8k": row.real.summary.model_dump(),
            "server": row.real.provenance.get("server"),
            "synthetic_tok_per_s": row.synthetic_tok_per_s,
            "synthetic_spread": row.synthetic_spread,
            "real_gain": row.real_gain and asdict(row.real_gain),
            "synthetic_gain": row.synthetic_gain and asdict(row.synthetic_gain),
            "gap": explain_gap(row.synthetic_gain, row.real_gain)
            if row.real_gain and row.synthetic_gain
            else None,
            "accuracy": row.accuracy and asdict(row.accuracy),
        }
        for row in found
    ]


def load_of(files: Sequence[ResultFile]) -> Load | None:
    """Means over the items of one workload, repeats pooled; None where nothing was measured."""
    items = [
        item
        for file in files
        for item in file.items
        if item.output_tokens and item.ttft_s is not None and item.latency_s is not None
    ]
    if not items:
        return None
    first = [item.chunks[0] if item.chunks else 1 for item in items]
    tokens = sum((item.output_tokens or 0) - count for item, count in zip(items, first, strict=True))
    seconds = sum((item.latency_s or 0) - (item.ttft_s or 0) for item in items)
    if not tokens or not seconds:
        return None
    rounds, accepted = sum(item.drafts or 0 for item in items), sum(item.accepted or 0 for item in items)
    return Load(
        ttft_s=sum(item.ttft_s or 0 for item in items) / len(items),
        tokens=tokens / len(items),
        tpot_s=seconds / tokens,
        accept_length=1 + accepted / rounds if rounds else 1.0,
    )


def paired_gain(base: Sequence[ResultFile], run: Sequence[ResultFile]) -> Gain | None:
    """The gain over the items that were measured in both: a failed request must not change the mix."""
    both = [_measured(a) & _measured(b) for a, b in zip(base, run, strict=True)]
    one, other = load_of(_only(base, both)), load_of(_only(run, both))
    return gain(one, other) if one and other else None


def _measured(file: ResultFile) -> set[str]:
    return {item.id for item in file.items if item.latency_s is not None}


def _only(files: Sequence[ResultFile], kept: Sequence[set[str]]) -> list[ResultFile]:
    return [
        file.model_copy(update={"items": [item for item in file.items if item.id in ids]})
        for file, ids in zip(files, kept, strict=True)
    ]


def _speeds(stage: StageFiles) -> list[float]:
    """Decode speed of every repeat of every round."""
    found = []
    for file in stage.synthetic:
        repeats = sorted({item.id.partition(".")[0] for item in file.items})
        for repeat in repeats:
            part = [item for item in file.items if item.id.partition(".")[0] == repeat]
            load = load_of([file.model_copy(update={"items": part})])
            if load:
                found.append(1 / load.tpot_s)
    return found


def _positions(file: ResultFile) -> str:
    shares = file.summary.acceptance
    return f" ({', '.join(f'{share:.0%}' for share in shares)})" if shares else ""


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(found: Gain | None) -> str:
    return "-" if found is None or not math.isfinite(found.total) else f"{found.total - 1:+.1%}"
