# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling eval synthetic`: fixed prompt and output lengths, from real text or, labelled as such, random tokens.

Random tokens never show what speculation gains: a draft guesses them by luck or never, and an output that is not
allowed to end falls into loops that are easy to guess. They are here to show how far such figures are from real text.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.report.result_file import Item, ResultFile, make
from vllm_ling.eval.runs.asking import Request, Sending, ask_items
from vllm_ling.eval.runs.journal import Journal
from vllm_ling.eval.runs.progress import RunProgress
from vllm_ling.eval.serving.client import COMPLETIONS, READ_TIMEOUT_S
from vllm_ling.eval.serving.served import Served

_TOKENIZE_CHARS = 200_000  # of text in one /tokenize request


@dataclass(frozen=True)
class Synthetic:
    """What is asked.

    Attributes:
        text: UTF-8 file that prompts are cut from; None for random tokens.
        isl, osl: prompt and output tokens of every request.
        requests: per repeat.
        repeats: the whole set again, with other prompts, so that the spread can be seen.
        seed: of the random choice of prompts.
    """

    text: Path | None
    isl: int = 1024
    osl: int = 256
    requests: int = 4
    repeats: int = 3
    concurrency: int = 1
    seed: int = 0
    timeout_s: float = READ_TIMEOUT_S

    @property
    def tokens(self) -> str:
        """What the prompts are made of."""
        return "text" if self.text else "random tokens"

    @property
    def label(self) -> str:
        """The name in tables, such as "text 1024/256"."""
        return f"{self.tokens} {self.isl}/{self.osl}"


def measure(what: Synthetic, served: Served, out: Path, *, label: str | None, restart: bool) -> ResultFile:
    """Runs the workload and writes `out`; nothing is judged, so items have no `correct`.

    Raises:
        LingError: too little text, lengths beyond the model's, or a server that cannot tokenize or stopped answering.
    """
    if served.max_model_len is not None and what.isl + what.osl > served.max_model_len:
        raise LingError(
            f"--isl {what.isl} and --osl {what.osl}: the server takes {served.max_model_len} tokens in all"
        )
    prompts = make_prompts(what, served)
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    workload = {**asdict(what), "text": what.text and what.text.name}
    del workload["timeout_s"]
    settings = {**served.identity(), "data_sha256": digest, **workload}
    requests = [
        _request(f"{number // what.requests}.{number % what.requests}", served.model, prompt, what.osl)
        for number, prompt in enumerate(prompts)
    ]
    how = Sending(served.url, COMPLETIONS, what.concurrency, timeout_s=what.timeout_s, uncached=True)
    with (
        Journal(out.with_name(out.name + ".partial"), settings, restart) as journal,
        RunProgress(f"{what.isl}/{what.osl} {what.tokens}") as progress,
    ):
        entries = ask_items(requests, how, journal, progress)
        items = [_item(entry, what) for entry in entries.values()]
        origin = {
            **provenance(),
            "label": label or what.label,
            "workload": f"synthetic, {what.tokens}",
            "settings": settings,
            "data_sha256": digest,
            "server": served.facts(),
        }
        result = make(origin, items)
        write_json(out, result.model_dump())
        # With errors the journal stays: the same command then asks for what failed, and for nothing else.
        if not result.summary.transport_errors:
            journal.finish(out)
    return result


def make_prompts(what: Synthetic, served: Served) -> list[list[int]]:
    """`requests * repeats` prompts of `isl` token ids, all different."""
    count, chooser = what.requests * what.repeats, random.Random(what.seed)
    if what.text is None:
        ids = sorted(set(tokenize(served, _ALPHABET)))
        return [chooser.choices(ids, k=what.isl) for _ in range(count)]
    try:
        text = what.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LingError(f"--text {what.text}: {error}") from None
    need = count * what.isl
    ids = []
    for start in range(0, len(text), _TOKENIZE_CHARS):
        ids += tokenize(served, text[start : start + _TOKENIZE_CHARS])
        if len(ids) >= 2 * need:
            break
    if len(ids) < need:
        raise LingError(
            f"--text {what.text}: {len(ids)} tokens, but {count} prompts of {what.isl} need {need}"
        )
    spread = (len(ids) - what.isl) / max(1, count - 1)
    starts = [int(number * spread) for number in range(count)]
    chooser.shuffle(starts)  # repeats must not follow the text's order
    return [ids[start : start + what.isl] for start in starts]


def tokenize(served: Served, text: str) -> list[int]:
    """Ids of a text, by the server's own tokenizer and without special tokens."""
    body = {"model": served.model, "prompt": text, "add_special_tokens": False}
    try:
        answer = httpx.post(
            f"{served.url}/tokenize", json=body, timeout=60, trust_env=False
        ).raise_for_status()
        return [int(token) for token in answer.json()["tokens"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise LingError(f"{served.url}/tokenize: {error}; the synthetic workload needs it") from None


def _request(name: str, model: str, prompt: Sequence[int], osl: int) -> Request:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": osl, "ignore_eos": True}
    body["temperature"] = 0
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return Request(name, body, digest[:16])


def _item(entry: dict[str, Any], what: Synthetic) -> Item:
    figures = {name: value for name, value in entry.items() if name not in ("digest", "text")}
    notes = [figures["note"]] if figures.get("note") else []
    for name, asked in (("prompt_tokens", what.isl), ("output_tokens", what.osl)):
        counted = figures.get(name)
        if counted is not None and counted != asked:
            notes.append(f"{name}: {counted} instead of {asked}")
    figures["note"] = "; ".join(notes) or None
    return Item(**figures, correct=None)


# Printable ASCII in pairs: enough distinct tokens of any tokenizer to draw from, none of them special.
_ALPHABET = " ".join(chr(a) + chr(b) for a in range(33, 127) for b in range(97, 123))
