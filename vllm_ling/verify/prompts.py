# SPDX-License-Identifier: Apache-2.0
"""Token prompts for the engines: word problems in Ling's chat format, or patterns where no tokenizer is at hand."""

import json
from pathlib import Path

from vllm_ling.tiny.evaluate import load_heldout
from vllm_ling.tiny.tokenizer import render_chat


def chat_prompts(folder: Path, count: int, vocab: int) -> tuple[list[list[int]], str]:
    """`count` prompts as token ids, and what they are made of."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        patterns = [
            [(7 * i * i + 13 * i + 5 * n) % (vocab - 8) + 4 for i in range(1 + (11 * n) % 70)]
            for n in range(1, count + 1)
        ]
        return patterns, "token patterns (the checkpoint has no tokenizer.json)"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    rows = load_heldout()
    texts = [render_chat(rows[number % len(rows)]["question"]) for number in range(count)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts], "word problems"


def stop_tokens(folder: Path) -> frozenset[int]:
    """Ids after which an answer is over, from generation_config.json and config.json; empty if neither says."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
    return frozenset(found)
