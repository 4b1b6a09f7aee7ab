# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.stat_logger_plugins`: registers the plugin's series in the API server, for Ling models only.

vLLM builds one per engine in every API server. It must never raise, and for other models it does nothing. (One side
effect is vLLM's own: with any such plugin installed, `--disable-log-stats` silences the log but keeps the counters.)
"""

import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_ling.compat import ARCHITECTURE
from vllm_ling.spec_decode.guard import DraftGuard
from vllm_ling.status import alarm, info, shared_folder, warning


class LingStatLogger(StatLoggerBase):
    """Follows acceptance and sleep states of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._collector: Any = None
        self._guard: DraftGuard | None = None
        try:
            if ARCHITECTURE in (vllm_config.model_config.architectures or []) and engine_index == 0:
                self._collector = _register(vllm_config)
                self._guard = self._collector.guard = _guard(vllm_config)
        except Exception as error:  # metrics must not keep a server from starting
            warning(f"no ling: series on /metrics: {type(error).__name__}: {error}")

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Adds one engine step's drafts to the rolling window, and logs what the guard makes of them."""
        try:
            self._record(scheduler_stats)
        except Exception as error:  # vLLM calls this in the loop that delivers every answer
            self._guard = None
            if self._collector is not None:
                self._collector.window = self._collector.guard = None
            warning(f"drafts are no longer watched: {type(error).__name__}: {error}")

    def _record(self, scheduler_stats: Any) -> None:
        spec = getattr(scheduler_stats, "spec_decoding_stats", None)
        if spec is not None and self._collector is not None and self._collector.window is not None:
            self._collector.window.add(spec.num_drafts, spec.num_accepted_tokens)
        if spec is not None and self._guard is not None:
            for event in self._guard.observe(
                spec.num_drafts, spec.num_accepted_tokens_per_pos, spec.num_draft_tokens_per_pos
            ):
                if event.raised:
                    alarm(event.alarm, event.message)
                else:
                    info(f"{event.alarm}: {event.message}")

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Counts level-2 sleeps: they discard the draft's weights, and only the target's are read again."""
        if self._collector is not None and not is_awake and level == 2:
            self._collector.level_2_sleeps += 1

    def log_engine_initialized(self) -> None:
        """Nothing to log: the records were logged as they were made."""


def _register(vllm_config: Any) -> Any:
    from prometheus_client import REGISTRY

    from vllm_ling.metrics.acceptance import AcceptanceWindow
    from vllm_ling.metrics.collector import LingCollector, config_labels

    for known in list(REGISTRY._collector_to_names):
        if isinstance(known, LingCollector):  # a second engine of this process
            REGISTRY.unregister(known)
    window = AcceptanceWindow() if vllm_config.speculative_config is not None else None
    collector = LingCollector(shared_folder(), config_labels(vllm_config), window)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        freeze(collector, REGISTRY)
    else:
        REGISTRY.register(collector)
    return collector


def _guard(vllm_config: Any) -> DraftGuard | None:
    """The guard of this server's drafts; its break-even is the byte model's, if known."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.num_speculative_tokens:
        return None
    k = speculative.num_speculative_tokens
    try:
        from vllm_ling.roofline.served import served_bytes

        model = served_bytes(vllm_config)
        break_even = model.round_bytes(k) / model.step_bytes(1)
    except Exception as error:
        info(
            f"draft guard: break-even unknown ({type(error).__name__}: {error}); slower-than-plain is not judged"
        )
        break_even = None
    return DraftGuard(k, break_even)


def freeze(collector: Any, registry: Any) -> None:
    """Several API servers share their metrics through files, which hold plain gauges only: the record as it is now.

    The model is loaded by the time vLLM builds stat loggers, so choices and proofs are complete; the rolling accept
    length is left to vLLM's own counters.
    """
    from prometheus_client import Gauge

    for family in collector.collect():
        if family.type != "gauge" or not family.samples:
            continue
        labels = list(family.samples[0].labels)
        gauge = Gauge(
            family.name, family.documentation, labels, registry=registry, multiprocess_mode="mostrecent"
        )
        for sample in family.samples:
            (gauge.labels(**sample.labels) if labels else gauge).set(sample.value)
