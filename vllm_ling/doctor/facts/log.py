# SPDX-License-Identifier: Apache-2.0
"""Facts from a server log of any size and content: bounded memory and time, the last server start counts.

Nothing that was read is executed, and a damaged line takes only its own facts away.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ling.doctor.facts import log_lines, wording
from vllm_ling.doctor.facts.drafts import accept_length, draft_tokens
from vllm_ling.doctor.facts.literals import literal
from vllm_ling.doctor.facts.ranks import RECORDED, LogRecords, put_ranks
from vllm_ling.doctor.facts.settings import put_settings
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.phrases import PHRASES, known_version
from vllm_ling.doctor.text import clean

_MOST_S = 20.0
# Long are only the lines with the arguments and the engine's configuration.
_LONG, _USUAL = ("arguments", "engine"), 2048
# What a log can tell; recorded as missing, with the reason, where it does not.
_KEYS = ("plugin.", "record.", "serve.", "log.", "recent.", "engine.", "server.")
_MARKED = re.compile("|".join(re.escape(phrase.marker) for phrase in PHRASES.values()))
_WINDOWS = 6  # of ten seconds each: the last minute of speculation
_ENGINE_WORDS = {
    "enforce_eager": r"\benforce_eager=(True|False)",
    "quantization": r"\bquantization=(\w+)",
    "tensor_parallel_size": r"\btensor_parallel_size=(\d+)",
    "enable_prefix_caching": r"\benable_prefix_caching=(True|False)",
    "max_seq_len": r"\bmax_seq_len=(\d+)",
    "device": r"\bdevice_config=(\w+)",
    "cudagraph_mode": r"'cudagraph_mode': (?:<CUDAGraphMode\.)?'?(\w+)",
    "capture_sizes": r"'cudagraph_capture_sizes': (\[[\d, ]*\])",
    "k": r"SpeculativeConfig\(.*?num_spec_tokens=(\d+)",
    "method": r"SpeculativeConfig\(method='(\w+)'",
    "model": r"\bmodel='([^']*)'",
}


def read_log(facts: Facts, path: Path) -> None:
    """States `log.*`, `plugin.*`, `record.*`, `recent.*` and `serve.*` facts from a log file."""
    facts.sources.add("log")
    try:
        if not path.is_file():
            raise OSError("not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            reading = _Reading()
            until = time.monotonic() + _MOST_S
            for line in log_lines.lines(file, size, PHRASES["arguments"].marker.encode()):
                reading.add(line)
                if time.monotonic() > until:
                    raise OSError(f"not read to its end in {_MOST_S:.0f} s: no server's log")
    except OSError as error:
        _unreadable(facts, path, f"cannot be read ({error.strerror or error})")
        return
    if size == 0:
        _unreadable(facts, path, "the file is empty")
    elif reading.binary > reading.total // 10:
        _unreadable(facts, path, "binary data, not a log (a compressed one must be unpacked first)")
    else:
        facts.put("log.bytes", size, str(path))
        facts.put("log.skipped_bytes", max(0, size - log_lines.HEAD - log_lines.TAIL), str(path))
        reading.state(facts, path)


def _unreadable(facts: Facts, path: Path, reason: str) -> None:
    facts.put("problem.log", f"{path.name}: {reason}", str(path))
    for key in _KEYS:
        facts.lacks(key, f"{path.name}: {reason}")


class _Reading:
    """Collects phrases; a new server start forgets the one before."""

    def __init__(self) -> None:
        self.total = self.binary = self.cold_starts = 0
        self.once: dict[str, list[str]] = {}
        self.gone: dict[str, str] = {}
        self.restart()

    def restart(self) -> None:
        self.cold_starts += "compiled" in self.once and "cached" not in self.once
        self.once = {}
        self.every: dict[str, list[list[str]]] = {}
        self.records = LogRecords()

    def add(self, raw: bytes) -> None:
        self.total += 1
        self.binary += b"\0" in raw
        line = log_lines.text(raw)
        if not _MARKED.search(line):
            return
        if PHRASES["arguments"].marker in line:
            self.restart()
        for name, phrase in PHRASES.items():
            seen = line if name in _LONG else line[:_USUAL]
            if phrase.marker in seen and (match := phrase.pattern.search(seen)):
                groups = [group or "" for group in match.groups()]
                if name == "plugin_failed" and name not in self.once:
                    self.every.pop("plugin_error", None)  # the cause stands in the traceback below
                self.once.setdefault(name, groups)
                if name in RECORDED:
                    self.records.add(seen, name, groups)
                    continue
                kept = self.every.setdefault(name, [])
                kept.append(groups)
                if name != "exception":  # there the first ones are the cause
                    del kept[:-64]
                else:
                    del kept[64:]

    def state(self, facts: Facts, path: Path) -> None:
        origin = path.name
        started = "engine" in self.once or "arguments" in self.once
        version = self.once["engine"][0] if "engine" in self.once else None
        if "bench" in self.once:
            facts.sources.add("bench")
            facts.put("bench.dataset", self.once["bench"][0], origin)
            if not started:  # a benchmark's own log
                facts.sources.discard("log")
                return
        if not started:
            _unreadable(facts, path, "no start of a vLLM server in it")
            return
        if version is not None:
            facts.put("server.version", clean(version, 40), origin)
            if not known_version(version):
                for key in _KEYS:
                    facts.lacks(key, f"{origin}: the log phrases of vLLM {clean(version, 40)} are not known")
                return
        parts: list[tuple[Callable[[Facts, str], None], str]] = [
            (self._arguments, "serve."),
            (self._engine, "engine."),
            (self._plugin, "plugin."),
            (self._phrases, "log."),
            (self._speculation, "recent."),
        ]
        self.gone = wording.vanished(version or "")
        unsaid = {
            key: self.gone[name] for name, keys in wording.TELLS.items() if name in self.gone for key in keys
        }
        with facts.withholding(unsaid):
            for part, key in parts:
                try:
                    part(facts, origin)
                except (ValueError, SyntaxError, OverflowError) as error:
                    facts.lacks(key, f"{origin}: a line is damaged ({type(error).__name__}: {error})")

    def _arguments(self, facts: Facts, origin: str) -> None:
        if "arguments" not in self.once:
            facts.lacks("serve.", f"{origin}: no line with the server's arguments")
            return
        try:
            given = literal(self.once["arguments"][0])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            facts.lacks("serve.", f"{origin}: the line with the server's arguments is damaged")
            return
        if isinstance(given, dict):
            put_settings(facts, given, origin)

    def _engine(self, facts: Facts, origin: str) -> None:
        if "engine" not in self.once:
            facts.lacks("log.", f"{origin}: the engine did not start")
            return
        words = self.once["engine"][1]
        found = {name: match[1] for name, rule in _ENGINE_WORDS.items() if (match := re.search(rule, words))}
        for name in ("enforce_eager", "enable_prefix_caching"):
            if name in found:
                facts.put(f"engine.{name}", found[name] == "True", origin)
        if "device" in found:
            facts.put("engine.device", found["device"], origin)
        if "quantization" in found:
            facts.put(
                "engine.quantization",
                None if found["quantization"] == "None" else found["quantization"],
                origin,
            )
        if "cudagraph_mode" in found:
            facts.put("engine.cudagraph_mode", found["cudagraph_mode"], origin)
        if "capture_sizes" in found:
            facts.put("engine.capture_sizes", literal(found["capture_sizes"]), origin)
        facts.put("serve.k", draft_tokens(found.get("k", 0)), origin)
        facts.put("serve.method", found.get("method"), origin)
        facts.put("serve.tensor_parallel_size", int(found.get("tensor_parallel_size", 1)), origin)
        if "model" in found:
            facts.put("serve.model", found["model"], origin)

    def _plugin(self, facts: Facts, origin: str) -> None:
        if "ling_active" in self.once:
            facts.put("plugin.state", "active", origin)
            facts.put("plugin.version", self.once["ling_active"][0], origin)
            facts.put("plugin.active", self.once["ling_active"][1], origin)
        elif "ling_inactive" in self.once:
            facts.put("plugin.state", "inactive", origin)
            facts.put("plugin.reason", self.once["ling_inactive"][0], origin)
        elif "plugin_failed" in self.once:
            cause = self.every.get("plugin_error", [[""]])[0][0]
            facts.put("plugin.state", "failed to import", origin)
            facts.put("plugin.reason", cause or "see the traceback in the log", origin)
        elif "ling_choice" in self.once or "ling_proof" in self.once:
            # vLLM loads plugins before it sets up its log in some programs, and the first line is lost.
            facts.put("plugin.state", "active", f"{origin}, by what it decided")
        elif "plugin_failed" in self.gone:
            facts.lacks("plugin.state", self.gone["plugin_failed"])
        elif "engine" in self.once:
            facts.put("plugin.state", "absent", origin)
            facts.put("plugin.listed", "plugin_listed" in self.once, origin)
        put_ranks(facts, self.records.ranks, origin)
        refused = [g[0] for g in self.every.get("ling_decode_refused", [])]
        facts.put("log.decode_refused", refused, origin)
        if facts.get("plugin.state") == "active":
            alarms: dict[str, str] = {}
            for raised, message, ended in self.every.get("ling_alarm", []):
                alarms.pop(ended, None)
                if raised:
                    alarms[raised] = message
            facts.put("recent.alarms", alarms, origin)
        failed = ("start_failed", "core_failed")
        if set(failed) <= self.gone.keys():
            facts.lacks("log.start", self.gone["start_failed"])
        elif "started" in self.once or "engine_stats" in self.once:
            facts.put("log.start", "done", origin)
        elif any(name in self.once for name in (*failed, "ling_error")):
            facts.put("log.start", "failed", origin)
            errors = self.every.get("exception", [])
            cause = self.once.get("ling_error", [": ".join(errors[0]) if errors else ""])[0]
            facts.put("log.start_error", cause, origin)
        else:
            facts.lacks("log.start", f"{origin}: ends before the server answers")

    def _phrases(self, facts: Facts, origin: str) -> None:
        for name in ("moe_mxfp4", "moe_fp8", "moe_int4", "moe_unquantized"):
            if name in self.once:
                facts.put("log.moe_format", name.removeprefix("moe_"), origin)
                facts.put("log.moe_backend", sorted({g[0] for g in self.every[name]}), origin)
                break
        else:
            facts.lacks("log.moe_backend", f"{origin}: no line names the MoE backend")
        if "engine" in self.once:
            facts.put("log.prefix_off", [g[0] for g in self.every.get("prefix_off", [])][:1], origin)
            fallback = self.once.get("moe_mxfp4_fallback", [None])[0]
            facts.put("log.moe_activation_fallback", fallback, origin)
            facts.put("log.graphs_off", "graphs_off" in self.once, origin)
            facts.put("log.graphs_captured", "graphs_done" in self.once, origin)
            facts.put("log.compiled", len(self.every.get("compiled", [])), origin)
            facts.put("log.compile_cached", len(self.every.get("cached", [])), origin)
            facts.put("log.earlier_cold_starts", self.cold_starts, origin)
            facts.put("log.runner", "v1" if "runner_v1" in self.once else "v2", origin)
            facts.put("log.draft_loaded", "draft_model" in self.once, origin)
            facts.put(
                "log.linear_kernels", sorted({g[0] for g in self.every.get("linear_kernel", [])}), origin
            )
            slept = any(g[1] == "2" for g in self.every.get("asleep", []))
            facts.put("log.slept_level_2", slept, origin)
        if "unknown_variable" in self.once or "engine" in self.once:
            names = sorted({g[0] for g in self.every.get("unknown_variable", [])})
            facts.put("log.unknown_variables", names, origin)
        if "e8m0" in self.once:
            facts.put("log.e8m0", self.once["e8m0"][0] == "enabled", origin)
        if "architecture" in self.once:
            facts.put("log.architectures", [g[0] for g in self.every["architecture"]], origin)
        if "kv_cache" in self.once:
            tokens, length, concurrency = self.once["kv_cache"]
            facts.put("log.kv_tokens", int(tokens.replace(",", "")), origin)
            facts.put("log.kv_concurrency", float(concurrency), origin)
            facts.put("serve.max_model_len_resolved", int(length.replace(",", "")), origin)
        else:
            facts.lacks("log.kv_concurrency", f"{origin}: no line with the KV cache's size")
        if "engine_stats" in self.once:
            facts.put(
                "recent.running", max(int(g[0]) for g in self.every["engine_stats"][-_WINDOWS:]), origin
            )

    def _speculation(self, facts: Facts, origin: str) -> None:
        windows = self.every.get("spec_metrics", [])[-_WINDOWS:]
        k = facts.get("serve.k", 0)
        if not windows or not k:
            facts.lacks("recent.accept_length", f"{origin}: no line with speculation metrics")
            return
        drafted = sum(float(window[2]) for window in windows)
        if not drafted:
            facts.lacks("recent.accept_length", f"{origin}: nothing was drafted")
            return
        drafts = drafted / k
        length = accept_length(sum(float(window[1]) for window in windows), drafts, k)
        rates: list[Any] = [0.0] * k
        for window in windows:
            share = float(window[2]) / drafted
            for position, rate in enumerate(window[3].split(", ")[:k]):
                rates[position] += share * float(rate)
        facts.put("recent.drafts", drafts, f"{origin}, last {len(windows)} of vLLM's speculation lines")
        facts.put("recent.accept_length", length, origin)
        facts.put("recent.per_position", rates, origin)
