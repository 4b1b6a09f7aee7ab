# SPDX-License-Identifier: Apache-2.0
"""Acceptance lost and bytes saved by a draft head of fewer rows: eval/results/draft-vocab.json.

Acceptance is tiny-ling's, replayed exactly with k = 3 on the sets of `draft_length`; its lists are counted in generated
problems of the training side. Bytes are those of Ling-3.0-flash with the same share of its vocabulary. The two do not
belong together: a vocabulary of 1,024 has another distribution than one of 157,184. So the rows of set "break_even"
say, from bytes alone, how much acceptance the owner of the real model may lose before the saving is gone.

    python -m vllm_ling.eval.studies.draft_vocab_study --out eval/results/draft-vocab.json
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.studies.draft_length import MOST, emitted, flash_bytes, flash_costs, replay
from vllm_ling.eval.studies.draft_traces import traces
from vllm_ling.quant.convert_progress import ByteProgress
from vllm_ling.roofline.bytes import accept_length
from vllm_ling.spec_decode.count_tokens import count
from vllm_ling.tiny.problems import problems
from vllm_ling.tiny.tokenizer import VOCAB_SIZE, render_chat

K = 3
FLASH_ROWS = (8192, 16384, 32768, 65536)
FLASH_VOCAB = flash_bytes().shape.vocab_size
# Acceptance of every position from which the loss is counted: accept lengths of 2.0, 2.69 and 3.4.
ACCEPTANCES = (0.54, 0.74, 0.9)
_PROBLEMS, _SEED = 20_000, 77


def same_share(flash_rows: int) -> int:
    """Rows of tiny-ling's vocabulary that are the same share of it."""
    return round(flash_rows * VOCAB_SIZE / FLASH_VOCAB)


def lists(sizes: Iterator[int]) -> dict[int, list[int]]:
    """Per size the ids counted in training-side problems."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "problems.txt")
        shown = islice(problems(_SEED, heldout=False), _PROBLEMS)
        text.write_text("\n".join(render_chat(p.question, p.answer) for p in shown), encoding="utf-8")
        for rows in sizes:
            with ByteProgress(Console(quiet=True), text.stat().st_size) as progress:
                vocab, _ = count(tiny_ling_path(), "tiny-ling", [text], rows, progress)
            found[rows] = vocab.ids
    return found


def measured(items: int) -> Iterator[dict[str, Any]]:
    """Rows of both sets: the full head, then every list."""
    model, texts = emitted(items)
    known = lists(same_share(rows) for rows in FLASH_ROWS)
    for name, (prompts, outputs) in texts.items():
        full = replay(name, f"k{K}", traces(model, prompts, outputs, MOST), flash_costs())
        yield _row(name, None, 1.0, full.accept_length, full.bytes_per_token, full)
        for flash_rows in FLASH_ROWS:
            ids = known[same_share(flash_rows)]
            short = traces(model, prompts, outputs, MOST, torch.tensor(ids))
            row = replay(name, f"k{K}", short, flash_costs(flash_rows))
            allowed, tokens = set(ids), [token for output in outputs for token in output]
            covered = sum(token in allowed for token in tokens) / len(tokens)
            yield _row(name, flash_rows, covered, row.accept_length, row.bytes_per_token, full)


def _row(
    name: str, rows: int | None, covered: float, length: float, cost: float, full: Any
) -> dict[str, Any]:
    return {
        "set": name,
        "draft_rows": rows or FLASH_VOCAB,
        "tiny_ling_rows": VOCAB_SIZE if rows is None else same_share(rows),
        "k": K,
        "covered": covered,
        "accept_length": length,
        "accept_length_lost": 1 - length / full.accept_length,
        "bytes_saved_per_round": flash_bytes().round_bytes(K) - flash_bytes(rows).round_bytes(K),
        "bytes_per_token": cost,
        "bytes_per_token_saved": 1 - cost / full.bytes_per_token,
    }


def break_even() -> Iterator[dict[str, Any]]:
    """What flash may lose: accept length and acceptance per position at which a token costs what it did."""
    full = flash_bytes().round_bytes(K)
    for rows in FLASH_ROWS:
        less = flash_bytes(rows).round_bytes(K)
        for acceptance in ACCEPTANCES:
            length = accept_length(acceptance, K) * less / full
            least = solve(lambda a: accept_length(a, K), length)
            yield {
                "set": "break_even",
                "draft_rows": rows,
                "k": K,
                "acceptance": acceptance,
                "accept_length": accept_length(acceptance, K),
                "bytes_saved_per_round": full - less,
                "round_saved": 1 - less / full,
                "break_even_accept_length": length,
                "break_even_acceptance": least,
                # If drafts fail only where their token is not in the list, it must cover this share of them.
                "break_even_covered": least / acceptance,
            }


def solve(rising: Callable[[float], float], value: float) -> float:
    """The x in 0 to 1 at which `rising` takes `value`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("build/draft-vocab.json"))
    args = parser.parse_args()
    rows = []
    for row in (*measured(args.items), *break_even()):
        rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
