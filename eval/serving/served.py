# SPDX-License-Identifier: Apache-2.0
"""What a running server says of itself: model, version, and the plugin's own record of choices and proofs."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_ling.errors import LingError
from vllm_ling.eval.serving.metrics import parse_counters
from vllm_ling.metrics import names


@dataclass(frozen=True)
class Served:
    """One server.

    Attributes:
        model: name to ask for.
        max_model_len: tokens of prompt and answer together, None if the server does not say.
        version: vLLM's, None if the server does not say.
        plugin: whether vllm-ling is active in a process; switched off, it still says so on the page.
        choices: what the plugin chose, such as {"lm_head": "fp8_online"}.
        proofs, faults: what its checks at load found, by code.
        draft_tokens: draft tokens a round, 0 without speculation.
    """

    url: str
    model: str
    max_model_len: int | None
    version: str | None
    plugin: bool = False
    choices: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    draft_tokens: int = 0

    def identity(self) -> dict[str, Any]:
        """What must be the same for two halves of a run to be one run."""
        return {
            "model": self.model,
            "vllm": self.version,
            "plugin": self.plugin,
            "choices": self.choices,
            "draft_tokens": self.draft_tokens,
        }

    def facts(self) -> dict[str, Any]:
        """For a result's provenance; the address is left out."""
        return {**self.identity(), "proofs": self.proofs, "faults": self.faults}


def describe(url: str, model: str | None = None) -> Served:
    """Asks a server at `url` (with or without /v1).

    Args:
        model: the served model to use, None for the only one.

    Raises:
        LingError: nobody answers, no such model, or several models and none named.
    """
    base = url.rstrip("/").removesuffix("/v1")
    models = _models(f"{base}/v1/models")
    if model is None and len(models) != 1:
        raise LingError(f"{url} serves {', '.join(models) or 'no model'}: name one with --model")
    if model is not None and model not in models:
        raise LingError(f"--model {model}: {url} serves {', '.join(models) or 'no model'}")
    name = model or next(iter(models))
    most, page = models[name].get("max_model_len"), _optional(f"{base}/metrics")
    try:
        found, drafts = read_record(page), len(parse_counters(page).accepted_at)
    except (ValueError, KeyError) as error:
        raise LingError(f"{base}/metrics: not readable ({error}); is this a vLLM server?") from None
    return Served(
        url=base,
        model=name,
        max_model_len=most if isinstance(most, int) else None,
        version=_version(_optional(f"{base}/version")),
        plugin="active" in found.get(names.PLUGIN, {}).values(),
        choices=found.get(names.CHOICE, {}),
        proofs=found.get(names.PROOF, {}),
        faults=found.get(names.FAULT, {}),
        draft_tokens=drafts,
    )


def _models(address: str) -> dict[str, dict[str, Any]]:
    try:
        return {str(entry["id"]): entry for entry in _get(address).json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise LingError(
            f"{address}: no list of models; is this an OpenAI server? (--url http://HOST:PORT)"
        ) from None


def _version(page: str) -> str | None:
    try:
        return str(json.loads(page)["version"])
    except (ValueError, KeyError, TypeError):
        return None


def read_record(page: str) -> dict[str, dict[str, str]]:
    """The plugin's series on a /metrics page, by series name: choices, proofs and faults; empty without the plugin."""
    found: dict[str, dict[str, str]] = {}
    lines = [line for line in page.splitlines() if line.startswith("ling:")]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == names.PLUGIN:
                found.setdefault(names.PLUGIN, {})[labels["process"]] = labels["state"]
            elif sample.name == names.CHOICE:
                found.setdefault(names.CHOICE, {})[labels["what"]] = labels["choice"]
            elif sample.name in (names.PROOF, names.FAULT):
                found.setdefault(sample.name, {})[labels["code"]] = labels["message"]
    return found


def _get(address: str) -> httpx.Response:
    try:
        return httpx.get(address, timeout=30, trust_env=False).raise_for_status()
    except httpx.InvalidURL as error:
        raise LingError(f"--url {address}: {error}") from None
    except httpx.HTTPError as error:
        raise LingError(f"{address}: {error}; is the server up? (--url http://HOST:PORT)") from None


def _optional(address: str) -> str:
    """The page, empty where there is none."""
    try:
        answer = httpx.get(address, timeout=30, trust_env=False)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.is_success else ""
