# SPDX-License-Identifier: Apache-2.0
"""For the tests of the report: seeded result files of three made-up runs, and a page taken apart."""

import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from vllm_ling.eval.report.result_file import Item, make

STEP_MS = {"baseline": 60.0, "head": 44.0, "mtp": 26.0}
ACCEPTANCE = (0.9, 0.8, 0.7)
PLOTS = {"plot-stages", "plot-latency", "plot-tokens", "plot-acceptance", "plot-output"}
NO_END = {"meta", "link"}


def run_items(name: str, count: int, seed: int) -> list[Item]:
    """`count` items of one of the runs in `STEP_MS`; only "mtp" speculates, with three draft tokens."""
    chooser = random.Random(f"{name} {seed}")
    lengths = random.Random(seed)
    items = []
    for n in range(count):
        wanted = 20 + int(lengths.expovariate(1 / 60))
        if chooser.random() < 0.01:
            items.append(Item(id=f"problem-{n}", correct=None, error="connection reset"))
            continue
        cut = wanted >= 256
        wanted = min(wanted, 256)
        chunks, rounds, accepted_at = [1], 0, [0, 0, 0]
        while sum(chunks) < wanted:
            new = 1
            if name == "mtp":
                rounds += 1
                # Later text is a little easier to draft.
                while new <= 3 and chooser.random() < ACCEPTANCE[new - 1] * (0.85 + 0.15 * sum(chunks) / 256):
                    accepted_at[new - 1] += 1
                    new += 1
            chunks.append(min(new, wanted - sum(chunks)))
        ttft = chooser.uniform(0.04, 0.09)
        decode = STEP_MS[name] / 1e3 * sum(chooser.gauss(1, 0.1) for _ in chunks[1:])
        items.append(
            Item(
                id=f"problem-{n}",
                correct=chooser.random() < 0.96 and not cut,
                invalid=cut,
                truncated=cut,
                prompt_tokens=lengths.randrange(30, 90),
                output_tokens=wanted,
                ttft_s=ttft,
                tpot_ms=1e3 * decode / (wanted - 1),
                latency_s=ttft + decode,
                chunks=chunks,
                drafts=rounds if name == "mtp" else None,
                accepted=sum(accepted_at) if name == "mtp" else None,
                accepted_at=accepted_at if name == "mtp" else None,
            )
        )
    return items


def origin(name: str) -> dict[str, Any]:
    """Provenance as `vllm_ling.eval.provenance` writes it, with a label, flags and the data's hash."""
    flags = ["--max-num-seqs", "1", "--additional-config", '{"ling": {"lm_head": "fp8"}}']
    if name == "mtp":
        flags += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    return {
        "label": name,
        "date": "2026-12-01T06:52:10+00:00",
        "command": ["vllm-ling", "eval", "run", "--items", "200"],
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": name == "head"},
        "python": "3.11.7",
        "packages": {"vllm-ling": "0.1.0", "vllm": "0.33.0", "torch": "2.11.0"},
        "gpus": ["Test GPU, 1024 MiB, 1.2.3"],
        "flags": flags,
        "data_sha256": "ab" * 32,
    }


def write_runs(folder: Path, count: int = 200, seed: int = 7) -> list[Path]:
    """Writes baseline.json, head.json and mtp.json, in this order."""
    paths = []
    for name in STEP_MS:
        path = folder / f"{name}.json"
        path.write_text(make(origin(name), run_items(name, count, seed)).model_dump_json(), encoding="utf-8")
        paths.append(path)
    return paths


class Page(HTMLParser):
    """The page as a browser would take it apart: tags, attributes, table cells, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in NO_END:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "data":
            self.values.append(str(dict(attrs)["value"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def plots(self) -> dict[str, dict[str, str | None]]:
        return {str(a["id"]): a for tag, a in self.tags if tag == "svg" and a["class"] == "plot"}


def shows(cell: str, value: float | None) -> bool:
    """Whether a cell is the dash of None, or the value but for what its decimals cut off (at most 1%)."""
    if value is None:
        return cell in ("-", "\u2013")
    places = len(cell.partition(".")[2])
    return abs(float(cell) - value) <= 0.5000001 * 10**-places and abs(float(cell) - value) <= 0.01 * abs(
        value
    )
