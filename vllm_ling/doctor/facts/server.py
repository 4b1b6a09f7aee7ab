# SPDX-License-Identifier: Apache-2.0
"""Facts from a running server: /version, and /metrics twice, a few seconds apart; three requests in all."""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ling.doctor import phrases
from vllm_ling.doctor.facts import pages
from vllm_ling.doctor.facts.drafts import MOST_DRAFT_TOKENS, accept_length
from vllm_ling.doctor.facts.pages import Page, ServerUnreadable
from vllm_ling.doctor.facts.ranks import Rank, put_ranks
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.text import clean
from vllm_ling.metrics import names as series

# What the guard's alarms say; the figures stand in the log.
_ALARMS = {
    "draft_chance": "drafts are noise",
    "draft_tail": "the last draft positions are practically never accepted",
    "draft_slow": "speculation costs more than it saves",
}
Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse_samples(text: str) -> Samples:
    """Samples of the series that doctor reads, by sample name; values that are no numbers are left out.

    Raises:
        ServerUnreadable: the text is not the Prometheus format, or holds none of vLLM's series.
    """
    from prometheus_client.parser import text_string_to_metric_families

    wanted = (*phrases.SERIES, *series.ALL)
    lines = [line for line in text.split("\n") if line.startswith(wanted)]
    found: Samples = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    found.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerUnreadable(f"/metrics: not the Prometheus text format ({type(error).__name__})") from None
    if not any(name.startswith("vllm:") for name in found):
        raise ServerUnreadable("/metrics: none of vLLM's series is there (--disable-log-stats, or not vLLM)")
    return found


class _Budget:
    """Time for all pages together, the sampling interval apart."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def read(self, url: str, max_bytes: int = pages.MAX_BYTES, share: float = 1.0) -> Page:
        """A page, within this share of the time that is left."""
        started = time.monotonic()
        try:
            return pages.read_page(url, max_bytes, self.left * share)
        finally:
            self.left = max(0.0, self.left - (time.monotonic() - started))


def read_server(facts: Facts, url: str, interval_s: float) -> None:
    """States `server.*`, `plugin.*`, `record.*`, `serve.*` and `recent.*` facts from the server at `url`."""
    import httpx  # noqa: F401  (imported here, so that the server's time is not spent on it)

    facts.sources.add("live")
    base = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    budget = _Budget(pages.DEADLINE_S)
    try:
        first = budget.read(f"{base}/metrics")
        if first.local is not None:
            facts.put("server.local", first.local, url)
        before = parse_samples(first.text)
        started = time.monotonic()
        _version(facts, base, budget)
        time.sleep(max(0.0, interval_s - (time.monotonic() - started)))
        after = parse_samples(budget.read(f"{base}/metrics").text)
    except ServerUnreadable as error:
        facts.put("problem.metrics", clean(error), url)
        for key in ("recent.", "record.", "plugin.", "server.", "serve.", "engine.", "log."):
            facts.lacks(key, str(error))
        return
    put_samples(facts, before, after, f"/metrics over {time.monotonic() - started:.1f} s")


def _version(facts: Facts, base: str, budget: _Budget) -> None:
    try:
        version = json.loads(budget.read(f"{base}/version", 1 << 16, 0.5).text)["version"]
        facts.put("server.version", clean(version, 40), "/version")
    except ServerUnreadable as error:
        facts.lacks("server.version", str(error))
    except (ValueError, KeyError, TypeError, RecursionError):
        facts.lacks("server.version", f"{base}/version: not vLLM's answer")


def put_samples(facts: Facts, before: Samples, after: Samples, origin: str) -> None:
    """States what two readings say; counters as differences, so that old traffic does not hide today's."""
    version = facts.get("server.version")
    if version is not None and not phrases.known_version(version):
        for key in ("recent.", "server."):
            facts.lacks(key, f"the series of vLLM {version} are not known")
        return
    parts: list[tuple[Callable[[Facts, Samples, Samples, str], None], tuple[str, ...]]] = [
        (_counters, ("recent.",)),
        (_ling, ("plugin.", "record.", "serve.", "engine.")),
        (_speculation, ("serve.", "recent.")),
        (_cache, ("engine.", "log.")),
    ]
    for part, keys in parts:
        try:
            part(facts, before, after, origin)
        except (ValueError, KeyError, OverflowError) as error:
            for key in keys:
                facts.lacks(key, f"/metrics has an unexpected form ({type(error).__name__}: {error})")


def _counters(facts: Facts, before: Samples, after: Samples, origin: str) -> None:
    for name in phrases.COUNTERS:
        if name in after:
            facts.put(f"recent.{name}", max(0.0, total(after, name) - total(before, name)), origin)
    for name, value in _grouped(after, phrases.FINISHED, "finished_reason").items():
        earlier = _grouped(before, phrases.FINISHED, "finished_reason").get(name, 0.0)
        facts.put(f"recent.finished.{name}", value - earlier, origin)
    if phrases.RUNNING in after:
        running = max(total(before, phrases.RUNNING), total(after, phrases.RUNNING))
        facts.put("recent.running", running, origin)
    for labels, _ in after.get(phrases.RUNNING, [])[:1]:
        facts.put("server.model_name", labels.get("model_name"), origin)
    if phrases.SLEEP_STATE in after:
        states = _grouped(after, phrases.SLEEP_STATE, "sleep_state")
        facts.put("recent.discarded", states.get("discard_all", 0.0) > 0, origin)


def total(samples: Samples, name: str) -> float:
    """Sum of a series over engines and labels."""
    return sum(value for _, value in samples.get(name, []))


def _grouped(samples: Samples, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in samples.get(name, []):
        sums[labels.get(label, "")] = sums.get(labels.get(label, ""), 0.0) + value
    return sums


def _speculation(facts: Facts, before: Samples, after: Samples, origin: str) -> None:
    if phrases.DRAFTS not in after:
        facts.put("serve.k", 0, f"{origin}: no speculation counters")
        facts.lacks("recent.accept_length", "the server exports no speculation counters")
        return
    earlier = _grouped(before, phrases.ACCEPTED_PER_POSITION, "position")
    later = _grouped(after, phrases.ACCEPTED_PER_POSITION, "position")
    if not later:
        raise ValueError("drafts are counted, but no positions")
    positions = [str(number) for number in range(min(len(later), MOST_DRAFT_TOKENS))]
    if set(positions) != set(later):
        raise ValueError("the draft positions are not counted from 0 on")
    facts.put("serve.k", len(positions), f"{origin}: positions counted")
    drafts = total(after, phrases.DRAFTS) - total(before, phrases.DRAFTS)
    if drafts <= 0:
        facts.lacks(
            "recent.accept_length",
            "nothing was drafted between the two readings; send requests, or --interval 10",
        )
        facts.lacks("recent.per_position", "nothing was drafted between the two readings")
        return
    accepted = total(after, phrases.ACCEPTED) - total(before, phrases.ACCEPTED)
    length = accept_length(accepted, drafts, len(positions))
    facts.put("recent.drafts", drafts, origin)
    facts.put("recent.accept_length", length, origin)
    facts.put("recent.per_position", [(later[p] - earlier.get(p, 0.0)) / drafts for p in positions], origin)


def _cache(facts: Facts, before: Samples, after: Samples, origin: str) -> None:
    for labels, _ in after.get(phrases.CACHE_CONFIG, [])[:1]:
        flag = labels.get("enable_prefix_caching")
        if flag in ("True", "False"):
            facts.put("engine.enable_prefix_caching", flag == "True", origin)
        for label, key in (
            ("gpu_memory_utilization", "serve.gpu_memory_utilization"),
            ("kv_cache_max_concurrency", "log.kv_concurrency"),
        ):
            if (value := _number(labels.get(label))) is not None:
                facts.put(key, value, origin)


def _ling(facts: Facts, before: Samples, after: Samples, origin: str) -> None:
    """The plugin's own record and the resolved configuration, as `vllm_ling.metrics` exports them."""
    if series.PLUGIN not in after:
        if series.INFO not in after:
            facts.put("plugin.state", "absent", origin)
        for key in ("record.", "serve.", "engine.", "log.", "recent.alarms", "recent.level_2_sleeps"):
            facts.lacks(key, "the server exports no series of the plugin; its log may tell (--log FILE)")
        return
    states = {labels.get("process", ""): labels for labels, _ in after[series.PLUGIN]}
    worst = next((s for s in states.values() if s.get("state") != "active"), next(iter(states.values())))
    facts.put("plugin.state", worst.get("state"), origin)
    facts.put("plugin.reason", worst.get("reason", ""), origin)
    facts.put("plugin.version", worst.get("version", ""), origin)
    facts.put("plugin.processes", sorted(states), origin)
    ranks: dict[str, Rank] = {}
    for s in _labels(after, series.CHOICE):
        ranks.setdefault(s.get("process", ""), Rank()).choices[s["what"]] = [s["choice"], s["reason"]]
    for s in _labels(after, series.PROOF):
        ranks.setdefault(s.get("process", ""), Rank()).proofs[s["code"]] = s["message"]
    for s in _labels(after, series.FAULT):
        ranks.setdefault(s.get("process", ""), Rank()).faults[s["code"]] = s["message"]
    put_ranks(facts, ranks, origin)
    if series.DRAFT_ALARM in after:
        standing = {s["alarm"]: _ALARMS.get(s["alarm"], origin) for s in _labels(after, series.DRAFT_ALARM)}
        facts.put("recent.alarms", standing, origin)
    if series.LEVEL_2_SLEEPS in after:
        facts.put("recent.level_2_sleeps", total(after, series.LEVEL_2_SLEEPS), origin)
    for labels in _labels(after, series.INFO)[:1]:
        _config(facts, labels, origin)


def _config(facts: Facts, labels: Mapping[str, str], origin: str) -> None:
    for name, key in series.INFO_FACTS.items():
        if name in labels:
            facts.put(key, _typed(labels[name]), origin)


def _typed(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text in ("None", ""):
        return None
    if text.startswith("["):
        return [int(word) for word in text.strip("[]").split(",") if word.strip().isdigit()]
    number = _number(text)
    if number is None:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def _number(text: str | None) -> float | None:
    try:
        number = math.nan if text is None else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _labels(samples: Samples, name: str) -> list[dict[str, str]]:
    return [labels for labels, value in samples.get(name, []) if value]
