# SPDX-License-Identifier: Apache-2.0
"""`ling.moe=auto`: chooses a backend of MXFP4 experts from measured times and keeps the verdict. No tensors here.

A verdict is one file per (GPU, shape, versions, settings) in the folder of the compiled kernels, written the same way.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.quant.jit import read_entry, write_entry

# How much a block's microseconds count, by tokens: what a generated token takes on a server without drafts (1 token a
# step), plus the same on one with drafts, where a step verifies 4 tokens and yields about 2.5 of them. The two share a
# verdict.
WEIGHTS = {1: 1.0, 4: 0.4}
# Seconds in which candidates may be started. First layers and first calls do not count, as vLLM, Humming and NVRTC
# compile in them once per machine; they have their own limit.
BUDGET_S = 6.0
WARM_UP_S = 120.0
# `ling` follows the backend whose weights it reads.
CANDIDATES = ("humming", "ling", "marlin", "triton", "b12x")
# What vLLM has for MXFP4 on NVIDIA GPUs besides, and why none of it is tried.
NEVER = {
    "triton_unfused": "vLLM's source says that it fails with MTP",
    "flashinfer_cutlass": "compiles for minutes at its first use; --moe-backend flashinfer_cutlass takes it",
    "flashinfer_trtllm": "may compile for minutes, or round activations to 8 bits (W4A8)",
    "deep_gemm": "rounds activations to 8 bits (W4A8), which is another model",
    "emulation": "dequantizes the experts at every call",
}
# The doctor knows measured choices by this beginning of their reason.
MEASURED = "auto measured"
_FORMAT = 1


class LeftOut(Exception):
    """Why a candidate cannot be measured; `lasting` if that will be so at the next start too."""

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


class Clock:
    """Seconds that a measurement has taken, and apart from them those of its warm-up."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start = now, now()
        self.warming = 0.0

    @property
    def spent(self) -> float:
        """Seconds so far without warm-up."""
        return self._now() - self._start - self.warming

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """What runs inside counts as warm-up."""
        begin = self._now()
        try:
            yield
        finally:
            self.warming += self._now() - begin

    @property
    def over(self) -> str:
        """Which limit was reached, or an empty text."""
        if self.spent >= BUDGET_S:
            return f"the {BUDGET_S:g} s for measuring were spent"
        return f"the {WARM_UP_S:g} s for compiling were spent" if self.warming >= WARM_UP_S else ""


@dataclass(frozen=True)
class Row:
    """One backend: microseconds a block by tokens, or why there are none."""

    backend: str
    us: dict[int, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def weighted(self) -> float:
        """What is compared; see WEIGHTS."""
        return sum(weight * self.us[tokens] for tokens, weight in WEIGHTS.items())


@dataclass(frozen=True)
class Verdict:
    """All backends, fastest first and those left out last.

    Attributes:
        lasting: False if a backend was left out for a reason that may be gone at the next start (time, memory).
        layers: copies of the layer that the measurement rotated over.
        seconds: how long it took, without warm-up.
        warming: how long first layers and first calls took; compilations are part of it.
        origin: "measured", "cache", or "measured" with the reason why it is not kept.
        note: why nothing was tried, where that is so.
    """

    rows: tuple[Row, ...]
    lasting: bool = True
    layers: int = 0
    seconds: float = 0.0
    warming: float = 0.0
    origin: str = "measured"
    note: str = ""

    @property
    def best(self) -> Row | None:
        """The fastest backend, None if nothing could be measured."""
        return self.rows[0] if self.rows and self.rows[0].us else None


@dataclass(frozen=True)
class AutoFacts:
    """What decides whether anything is measured. Texts are empty where nothing stands against it."""

    ranks: int = 1
    sleep_mode: bool = False
    activations: str = ""
    ling_problem: str = ""


def not_measured(facts: AutoFacts) -> str:
    """Why no backend is timed, or an empty text."""
    if facts.ranks > 1:
        return (
            f"with {facts.ranks} parallel ranks nothing is measured, as their steps would have to agree; "
            "ling is left out: its kernel serves one GPU"
        )
    if facts.sleep_mode:
        return "nothing is measured with --enable-sleep-mode, whose memory pool keeps what is freed"
    if facts.activations:
        return f"nothing is measured: {facts.activations} asks for other activations than BF16"
    return ""


def survey(run: Callable[[str], Mapping[int, float]], facts: AutoFacts, clock: Clock) -> Verdict:
    """Times every candidate with `run`, which raises to leave one out. Never raises."""
    rows, lasting = [], True
    for name in CANDIDATES:
        if name == "ling" and facts.ling_problem:
            rows.append(Row(name, reason=facts.ling_problem))
            continue
        if clock.over:
            rows.append(Row(name, reason=f"not started: {clock.over}"))
            lasting = False
            continue
        try:
            us = run(name)
            rows.append(Row(name, {tokens: round(float(us[tokens]), 2) for tokens in WEIGHTS}))
        except Exception as error:  # a backend that fails is one that cannot be chosen
            rows.append(Row(name, reason=describe(error)))
            lasting = lasting and getattr(error, "lasting", type(error).__name__ != "OutOfMemoryError")
    rows.sort(key=lambda row: row.weighted if row.us else float("inf"))
    rows += [Row(name, reason=reason) for name, reason in NEVER.items()]
    return Verdict(tuple(rows), lasting, seconds=clock.spent, warming=clock.warming)


def describe(error: Exception) -> str:
    """One line about what went wrong, without the names of errors that a log reader takes for the server's own."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, LeftOut | LingError | ValueError) and text:
        return text
    return f"{type(error).__name__} ({text})" if text else type(error).__name__


def decide(verdict: Verdict, fallback: str) -> tuple[str, bool, str]:
    """(vLLM's backend or "stock", whether our kernel decodes, reason with the figures).

    `fallback` is the reason for vLLM's own choice, which stands if nothing was measured.
    """
    best = verdict.best
    if best is None:
        tried = "; ".join(f"{row.backend}: {row.reason}" for row in verdict.rows if row.backend in CANDIDATES)
        return "stock", False, f"{fallback}; {verdict.note or f'nothing could be measured: {tried}'}"
    figures = ", ".join(
        f"{row.backend} {'/'.join(f'{row.us[tokens]:.1f}' for tokens in WEIGHTS)}"
        for row in verdict.rows
        if row.us
    )
    tokens = " and ".join(str(tokens) for tokens in WEIGHTS)
    reason = f"{MEASURED} {best.backend} fastest, us a block at {tokens} tokens: {figures}"
    if best.backend == "ling":
        return "humming", True, f"{reason}; our kernel decodes from Humming's weights"
    return best.backend, False, reason


def table(verdict: Verdict) -> list[str]:
    """Lines for the log: every backend with its figures, or why it was left out."""
    weights = " + ".join(f"{weight:g} x {tokens}-token us" for tokens, weight in WEIGHTS.items())
    took = f"{verdict.seconds:.1f} s and {verdict.warming:.1f} s of warm-up"
    lines = [
        f"moe auto: {verdict.origin}, {took}, rotating over {verdict.layers} layers; weighted is {weights}"
    ]
    for row in verdict.rows:
        if row.us:
            cells = ", ".join(f"{row.us[tokens]:.1f} us at {tokens}" for tokens in WEIGHTS)
            lines.append(f"moe auto: {row.backend}: {cells}, weighted {row.weighted:.1f}")
        else:
            lines.append(f"moe auto: {row.backend} left out: {row.reason}")
    return lines


def verdict_key(facts: Mapping[str, Any]) -> str:
    """Digest of everything that the figures depend on."""
    asked = {"format": _FORMAT, "weights": list(WEIGHTS.items()), "candidates": CANDIDATES, "facts": facts}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def _path(cache: Path, key: str) -> Path:
    return cache / f"moe-auto-{key[:20]}.json"


def load(cache: Path, key: str) -> Verdict | None:
    """The verdict kept under `key`; None if there is none, or it is damaged or another's."""
    stored = read_entry(_path(cache, key), key)
    if stored is None:
        return None
    try:
        facts = json.loads(stored)
        rows = [
            Row(row["backend"], {int(n): float(us) for n, us in row["us"].items()}, row["reason"])
            for row in facts.pop("rows")
        ]
        verdict = Verdict(tuple(rows), **(facts | {"origin": "cache"}))
        return verdict if verdict.best and verdict.best.weighted > 0 else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def store(cache: Path, key: str, verdict: Verdict) -> Verdict:
    """Keeps a verdict that will still hold at the next start; its `origin` then says so if the cache refused it."""
    if verdict.best is None or not verdict.lasting:
        return replace(verdict, origin="measured, not kept as the next start may do better")
    problem = write_entry(_path(cache, key), key, json.dumps(asdict(verdict)).encode())
    return verdict if problem is None else replace(verdict, origin=f"measured (cache: {problem})")
