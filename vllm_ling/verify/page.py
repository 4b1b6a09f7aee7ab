# SPDX-License-Identifier: Apache-2.0
"""The verdict on one page, to be attached to a report."""

from collections.abc import Mapping
from typing import Any

from vllm_ling.eval.report.markdown import escape

_MEANING = {
    "ok": "every part that ran found what it must",
    "warn": "works, but something is slower or less certain than it should be",
    "fail": "something is wrong",
    "unknown": "nothing wrong was found, but evidence is missing",
}
_ABOUT = {
    "head": "FP8 head against the BF16 head",
    "kernels": "kernels and torch paths against the fp32 reference on real layers",
    "logits": "the plugin's logits against stock vLLM (GPU) or the fp32 reference (CPU)",
    "greedy": "greedy output with speculation against without",
    "gsm8k": "GSM8K items through the server",
    "speed": "speed of word problems, one at a time",
}


def page(content: Mapping[str, Any]) -> str:
    """Markdown of a verification's JSON."""
    origin, findings = content["provenance"], content["findings"]
    model = origin["model"]
    lines = [f"# Verification of {escape(model['name'])}: {content['outcome']}", ""]
    lines += [f"{_MEANING[content['outcome']]}.", ""]
    lines += ["| part | outcome | what was seen |", "|---|---|---|"]
    seen = {finding["part"]: finding for finding in findings}
    for part, about in _ABOUT.items():
        finding = seen.get(part)
        if finding is None:
            lines.append(f"| {part} | not run | {about} |")
            continue
        outcome = finding["outcome"]
        shown = outcome if outcome in ("ok", "unknown") else f"**{outcome}**"
        lines.append(f"| {part} | {shown} | {escape(finding['evidence'])} |")
    fixes = [(finding["part"], finding["fix"]) for finding in findings if finding["fix"]]
    if fixes:
        lines += ["", "What to do:", ""]
        lines += [f"- {part}: {escape(fix)}" for part, fix in fixes]
    lines += ["", "Origin:", "", *(f"- {name}: {text}" for name, text in _origin(content))]
    return "\n".join(lines) + "\n"


def _origin(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    origin = content["provenance"]
    model, git = origin["model"], origin["git"]
    size = f"{model['bytes'] / 1e9:.2f} GB in {model['shards']} shards"
    found = [
        ("date", origin["date"]),
        ("model", f"{escape(model['name'])}, revision {model['revision'] or 'unknown'}, {size}"),
        ("config.json", f"SHA-256 {model['config_sha256']}"),
        ("serve flags", escape(" ".join(origin["serve"])) or "none"),
        ("machine", escape(", ".join(origin["gpus"]) or f"no GPU, {origin['cpu']['model']}")),
        ("versions", escape(", ".join(f"{name} {version}" for name, version in origin["versions"].items()))),
    ]
    if git:
        found.append(("commit", f"{git['commit']}{' with changes' if git['dirty'] else ''}"))
    times = ", ".join(f"{part} {record['seconds']:.0f}" for part, record in content["parts"].items())
    return [*found, ("seconds", times or "none")]
