# SPDX-License-Identifier: Apache-2.0
"""Turns the status records of the server's processes into Prometheus samples, at scrape time.

The engine core and its workers are processes of their own. Each writes its record into a folder that the front process
made (`status.share`); here the files are read when somebody scrapes, so an idle server does nothing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_ling import __version__
from vllm_ling.doctor.text import clean
from vllm_ling.metrics import names
from vllm_ling.metrics.acceptance import AcceptanceWindow
from vllm_ling.options import parse_options
from vllm_ling.spec_decode.guard import Alarm, DraftGuard
from vllm_ling.status import STATUS

_MAX_RECORD = 1 << 20


def read_records(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Status record by process name: this process's own, and those that others wrote into `folder`.

    Workers of several engines have the same names; from the second on the process id is put behind it.
    """
    records = {"APIServer": STATUS.as_dict()}
    for path in sorted(folder.glob("*.json")) if folder else []:
        try:
            with path.open(encoding="utf-8") as file:
                found = json.loads(file.read(_MAX_RECORD))
            name, record = str(found["process"]), found["record"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being replaced, or not ours
        if isinstance(record, dict) and name != "MainProcess":
            records[name if name not in records else f"{name} {path.stem}"] = record
    return records


def config_labels(vllm_config: Any) -> dict[str, str]:
    """What doctor needs of the resolved configuration, as labels; an attribute that this vLLM lacks is left out."""
    speculative = vllm_config.speculative_config
    paths: dict[str, tuple[Any, str]] = {
        "model": (vllm_config.model_config, "model"),
        "device": (vllm_config.device_config, "device_type"),
        "quantization": (vllm_config.model_config, "quantization"),
        "head_dtype": (vllm_config.model_config, "head_dtype"),
        "dtype": (vllm_config.model_config, "dtype"),
        "enforce_eager": (vllm_config.model_config, "enforce_eager"),
        "max_model_len": (vllm_config.model_config, "max_model_len"),
        "cudagraph_mode": (vllm_config.compilation_config, "cudagraph_mode"),
        "capture_sizes": (vllm_config.compilation_config, "cudagraph_capture_sizes"),
        "moe_backend": (vllm_config.kernel_config, "moe_backend"),
        "max_num_seqs": (vllm_config.scheduler_config, "max_num_seqs"),
        "tensor_parallel_size": (vllm_config.parallel_config, "tensor_parallel_size"),
        "draft_head_quantization": (speculative, "draft_lm_head_quantization"),
    }
    labels = {
        name: _label(getattr(place, attribute))
        for name, (place, attribute) in paths.items()
        if place is not None and hasattr(place, attribute)
    }
    runner = getattr(vllm_config, "use_v2_model_runner", None)
    if isinstance(runner, bool):
        labels["runner"] = "v2" if runner else "v1"
    labels["k"] = str(speculative.num_speculative_tokens) if speculative else "0"
    labels["method"] = str(speculative.method) if speculative else "None"
    options = parse_options(vllm_config.additional_config)
    for option in ("inject_fault", "on_fault", "lm_head", "moe", "linear", "decode", "draft_gate"):
        labels[option] = str(getattr(options, option))
    return labels


def _label(value: Any) -> str:
    # An enum member by its name, a torch dtype without its module.
    return str(getattr(value, "name", value)).removeprefix("torch.")


class LingCollector(Collector):
    """Yields the plugin's series.

    Args:
        folder: where other processes leave their records; None if they cannot.
        config: labels of the resolved configuration.
        window: rolling acceptance, None without speculation.
    """

    def __init__(
        self, folder: Path | None, config: Mapping[str, str], window: AcceptanceWindow | None
    ) -> None:
        self.folder, self.config, self.window = folder, dict(config), window
        self.guard: DraftGuard | None = None
        self.level_2_sleeps = 0

    def describe(self) -> Iterable[Metric]:
        """Nothing: registration must not read files."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All families, from the records as they are now."""
        records = read_records(self.folder)
        yield _info(
            names.PLUGIN,
            "State of vllm-ling in each process.",
            [
                {
                    "process": process,
                    "state": r.get("state", ""),
                    "reason": r.get("reason", ""),
                    "version": __version__,
                }
                for process, r in records.items()
            ],
        )
        yield _info(
            names.CHOICE,
            "Choices between code paths and their reasons.",
            [
                {"process": process, "what": c["what"], "choice": c["choice"], "reason": c["reason"]}
                for process, r in records.items()
                for c in r.get("choices", {}).values()
            ],
        )
        for name, kind, about in (
            (names.PROOF, "proofs", "Checks of the loaded model that passed."),
            (names.FAULT, "faults", "Checks of the loaded model that failed."),
        ):
            yield _info(
                name,
                about,
                [
                    {"process": process, "code": code, "message": message}
                    for process, r in records.items()
                    for code, message in r.get(kind, {}).items()
                ],
            )
        faults = {code for r in records.values() for code in r.get("faults", {})}
        yield GaugeMetricFamily(names.FAULTS, "How many kinds of proofs failed at load.", value=len(faults))
        yield _info(names.INFO, "Resolved configuration.", [self.config])
        yield CounterMetricFamily(
            names.LEVEL_2_SLEEPS.removesuffix("_total"),
            "Level-2 sleeps since the start.",
            value=self.level_2_sleeps,
        )
        if self.window is not None and (length := self.window.accept_length()) is not None:
            yield GaugeMetricFamily(
                names.ACCEPT_LENGTH, "Tokens per verify step, rolling minute.", value=length
            )
        if self.guard is not None:
            alarms = GaugeMetricFamily(
                names.DRAFT_ALARM, "1 while the guard's alarm stands.", labels=["alarm"]
            )
            for alarm in get_args(Alarm):
                alarms.add_metric([alarm], float(alarm in self.guard.alarms))
            yield alarms
            shares = GaugeMetricFamily(
                names.ACCEPTANCE, "Acceptance of each draft position, last 2,000 rounds.", labels=["position"]
            )
            for position, share in enumerate(self.guard.acceptance() or [], 1):
                shares.add_metric([str(position)], share)
            yield shares


def _info(name: str, about: str, rows: list[dict[str, Any]]) -> GaugeMetricFamily:
    labels = list(rows[0]) if rows else []
    family = GaugeMetricFamily(name, about, labels=labels)
    for row in rows:
        family.add_metric([clean(row[label]) for label in labels], 1.0)
    return family
