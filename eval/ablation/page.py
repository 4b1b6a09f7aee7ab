# SPDX-License-Identifier: Apache-2.0
"""An `ablation.json` as a markdown table and as a plot. Both come from the file alone, so they can be made again."""

import math
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.report import svg
from vllm_ling.eval.report.beside import write_beside

SCHEMA_VERSION = 2
_ROW = 40
_CAUSES = {
    "accept_length": "accept length",
    "step_time": "step time",
    "fixed_time": "fixed time",
    "output_length": "output length",
}


def write_page(path: Path) -> str:
    """Writes `.md` and, where a load was measured, `.svg` beside the result; returns the markdown text.

    Raises:
        LingError: the file is missing or no result of eval ablate.
    """

    def checked(result: dict[str, Any]) -> str:
        if (version := result["schema_version"]) != SCHEMA_VERSION:
            raise LingError(f"{path}: schema_version {version}, and this version reads {SCHEMA_VERSION}")
        return markdown(result)

    return write_beside(path, "eval ablate", checked, plot)


def markdown(result: dict[str, Any]) -> str:
    """The table, what each stage's server said of itself, the gaps, and what may be claimed."""
    stages = result["stages"]
    asked = next((stage["workload"] for stage in stages if stage["gsm8k"]), None)
    drafts = any(stage["speculates"] or load["accept_length"] for stage in stages for load in stage["loads"])
    headings = ["stage"]
    if asked:
        headings += [f"{asked} tok/s", "TPOT ms", "latency s, mean", "p95", "accept length (positions)"]
        headings += ["accuracy", "gain real"]
    for load in stages[0]["loads"] if stages else []:
        headings += [f"{load['load']} tok/s (spread)", "TPOT ms", "TTFT ms"]
        headings += [*(["accept length"] if drafts else []), "gain"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "--:|" * (len(headings) - 1)]
    for stage in stages:
        cells = [stage["name"], *(_real_cells(stage) if asked else [])]
        for load in stage["loads"]:
            cells += _load_cells(load, drafts)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_notes(result)]
    return "\n".join(lines) + "\n"


def _real_cells(stage: dict[str, Any]) -> list[str]:
    s = stage["gsm8k"]
    shares = s["acceptance"]
    positions = f" ({', '.join(f'{share:.0%}' for share in shares)})" if shares else ""
    return [
        _figure(s["tok_per_s"], ".1f"),
        _figure(s["tpot_ms"], ".2f"),
        _figure(s["latency_s_mean"], ".2f"),
        _figure(s["latency_s_p95"], ".2f"),
        _figure(s["accept_length"], ".2f") + positions,
        _figure(s["accuracy"], ".2%"),
        _percent(stage["real_gain"]),
    ]


def _load_cells(load: dict[str, Any], drafts: bool) -> list[str]:
    spread = load["spread"]
    return [
        _figure(load["tok_per_s"], ".1f") + (f" ({spread[0]:.1f} to {spread[1]:.1f})" if spread else ""),
        _figure(load["tpot_ms"], ".2f"),
        _figure(load["ttft_ms"], ".0f"),
        *([_figure(load["accept_length"], ".2f")] if drafts else []),
        _percent(load["gain"]),
    ]


def _notes(result: dict[str, Any]) -> list[str]:
    stages, base = result["stages"], result["base"]
    lines = []
    if result["random_weights"]:
        lines.append(
            f"{result['random_weights']}: the weights are random, so the answers are noise; only times are measured."
        )
    lines += [
        f"{stage['name']}: accept length {stage['set_accept_length']:g} is set (vLLM accepts drafts by lot): the "
        "figures are the time of a round, not what a text accepts."
        for stage in stages
        if stage["set_accept_length"] is not None
    ]
    lines += [f"{stage['name']}: {_said(stage['server'])}" for stage in stages]
    lines += [
        line
        for stage in stages
        for load in stage["loads"]
        if stage["name"] != base and (line := _gap_line(stage, load))
    ]
    lines += [
        f"{stage['name']}: accuracy {stage['accuracy']['verdict']} against {base}, margin {result['margin']:.2%}: "
        f"{stage['accuracy']['sentence']}"
        for stage in stages
        if stage["accuracy"]
    ]
    lines += [
        f"{stage['name']}: {stage['failed']} requests failed; they are in no figure"
        for stage in stages
        if stage["failed"]
    ]
    lines += [f"{name}: FAILED, so it is not in the table: {why}" for name, why in result["failures"].items()]
    return lines


def _said(server: dict[str, Any]) -> str:
    """What the server's own record said: choices that a stage is about, proofs."""
    version = f"vLLM {server['vllm']}"
    if not server["plugin"]:
        return f"{version}, the plugin is off"
    choices = server["choices"]
    shown = [name for name in ("lm_head", "moe decode", "target decode", "draft decode") if name in choices]
    if "moe decode" not in choices:
        shown += sorted(name for name in choices if name.startswith("moe "))
    said = [f"{name} = {choices[name]}" for name in shown]
    linear = [choice for name, choice in choices.items() if name.startswith("linear ") and " x " in name]
    said += [f"linear = {choice} ({linear.count(choice)} of {len(linear)})" for choice in sorted(set(linear))]
    proofs = ", ".join(server["proofs"]) or "none"
    return f"{version}, {', '.join(said)}; proofs: {proofs}"


def _gap_line(stage: dict[str, Any], load: dict[str, Any]) -> str | None:
    """What the load promised, what real text gave, and the factor that each cause puts between the two."""
    if load["gap"] is None:
        return None
    why = ", ".join(f"{cause} x{load['gap'][name]:.2f}" for name, cause in _CAUSES.items())
    return (
        f"{stage['name']}: gap: {load['load']} promised {_percent(load['gain'])}, real text gave "
        f"{_percent(stage['real_gain'])}: x{load['gap']['total']:.2f} = {why}"
    )


def plot(result: dict[str, Any]) -> str:
    """One panel a load: milliseconds a token of every stage, as bars. Empty where no load was measured."""
    panels: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for stage in result["stages"]:
        for load in stage["loads"]:
            if load["tpot_ms"] is not None:
                panels.setdefault(load["load"], []).append((stage, load))
    if not panels:
        return ""
    found = [load["tpot_ms"] for rows in panels.values() for _, load in rows]
    height = sum(30 + _ROW * len(rows) for rows in panels.values())
    inside = svg.Frame(
        svg.axis("milliseconds a token", found), svg.axis("", []), 20, svg.WIDTH - 24, 6, 6 + height
    )
    body, top, told = svg.x_axis(inside), inside.top, []
    for label, rows in panels.items():
        body.append(svg.text(inside.left, top + 18, label, "name"))
        top += 30
        for series, (stage, load) in enumerate(rows):
            words = f"{stage['name']}: {load['tpot_ms']:.2f} ms, {load['tok_per_s']:.0f} tok/s"
            if load["gain"] is not None and stage["name"] != result["base"]:
                words += f", {_percent(load['gain'])}"
            if stage["set_accept_length"] is not None:
                words += f" (accept length {stage['set_accept_length']:g}, set)"
            told.append(f"{label}, {words}")
            body.append(svg.text(inside.left + 4, top + 14, words, "halo"))
            body.append(svg.bar(inside, 0, load["tpot_ms"], top + 19, 13, f"bar {svg.look(series)}", words))
            top += _ROW
    return svg.alone(svg.svg("ablation", f"Time of a token by stage. {'; '.join(told)}", height + 64, body))


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(gain: dict[str, float] | None) -> str:
    return "-" if gain is None or not math.isfinite(gain["total"]) else f"{gain['total'] - 1:+.1%}"
