# SPDX-License-Identifier: Apache-2.0
"""The figures of an ablation: per stage what real text gave, what each synthetic load promised, and the gap between."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from vllm_ling.eval.ablation.gap import Gain, Load, explain_gap, gain
from vllm_ling.eval.ablation.run import StageFiles
from vllm_ling.eval.ablation.stages import AblationStage
from vllm_ling.eval.report.compare import paired_accuracy
from vllm_ling.eval.report.result_file import ResultFile
from vllm_ling.eval.report.statistics import Comparison


@dataclass(frozen=True)
class LoadRow:
    """One synthetic load on one stage.

    Attributes:
        tok_per_s: decode speed, the median of all repeats; `spread` their lowest and highest.
        tpot_ms, ttft_ms, latency_s_mean: means over the requests.
        gain: ratio of mean latency to the first stage's.
        gap: real gain over this one and its factors; None where real text was not asked.
    """

    load: str
    tok_per_s: float | None
    spread: tuple[float, float] | None
    tpot_ms: float | None
    ttft_ms: float | None
    latency_s_mean: float | None
    accept_length: float | None
    gain: Gain | None
    gap: dict[str, float] | None


@dataclass(frozen=True)
class Row:
    """One stage. Gains are ratios of mean latency to the first stage's; `accuracy` compares with it, item by item."""

    stage: AblationStage
    real: ResultFile | None
    loads: list[LoadRow]
    real_gain: Gain | None
    accuracy: Comparison | None
    server: dict[str, Any]
    failed: int = 0


def rows(stages: Sequence[StageFiles], margin: float, base: str) -> list[Row]:
    """The table's rows.

    Args:
        base: the stage that the others are compared with; without it in `stages` nothing is compared.
    """
    first = next((stage for stage in stages if stage.stage.name == base), None)
    return [_row(stage, first, margin) for stage in stages]


def _row(stage: StageFiles, base: StageFiles | None, margin: float) -> Row:
    real, accuracy = None, None
    if stage.gsm8k and base and base.gsm8k:
        real = paired_gain([base.gsm8k], [stage.gsm8k])
        if stage is not base:
            accuracy = paired_accuracy(base.gsm8k.items, stage.gsm8k.items, margin)
    files = [
        *([stage.gsm8k] if stage.gsm8k else []),
        *(file for one in stage.synthetic.values() for file in one),
    ]
    return Row(
        stage=stage.stage,
        real=stage.gsm8k,
        loads=[_load_row(label, stage, base, real) for label in stage.synthetic],
        real_gain=real,
        accuracy=accuracy,
        server=stage.server,
        failed=sum(file.summary.transport_errors for file in files),
    )


def _load_row(label: str, stage: StageFiles, base: StageFiles | None, real: Gain | None) -> LoadRow:
    files = stage.synthetic[label]
    found, speeds = load_of(files), _speeds(files)
    gained = paired_gain(base.synthetic[label], files) if base else None
    drafted = any(file.summary.accept_length is not None for file in files)
    latencies = [item.latency_s for file in files for item in file.items if item.latency_s is not None]
    return LoadRow(
        load=label,
        tok_per_s=median(speeds) if speeds else None,
        spread=(min(speeds), max(speeds)) if speeds else None,
        tpot_ms=1e3 * found.tpot_s if found else None,
        ttft_ms=1e3 * found.ttft_s if found else None,
        latency_s_mean=mean(latencies) if latencies else None,
        accept_length=found.accept_length if found and drafted else None,
        gain=gained,
        gap=explain_gap(gained, real) if gained and real else None,
    )


def as_data(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain JSON data."""
    return [
        {
            "name": row.stage.name,
            "failed": row.failed,
            "speculates": row.stage.speculates,
            "set_accept_length": row.stage.accept_length,
            "gsm8k": row.real and row.real.summary.model_dump(),
            "workload": row.real and row.real.provenance.get("workload"),
            "loads": [asdict(load) for load in row.loads],
            "real_gain": row.real_gain and asdict(row.real_gain),
            "accuracy": row.accuracy and asdict(row.accuracy),
            "server": row.server,
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


def _speeds(files: Sequence[ResultFile]) -> list[float]:
    """Decode speed of every repeat of every round."""
    found = []
    for file in files:
        repeats = sorted({item.id.partition(".")[0] for item in file.items})
        for repeat in repeats:
            part = [item for item in file.items if item.id.partition(".")[0] == repeat]
            load = load_of([file.model_copy(update={"items": part})])
            if load:
                found.append(1 / load.tpot_s)
    return found
