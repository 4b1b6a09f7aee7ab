# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling draft-vocab`: counts the tokens of text with the model's own tokenizer and keeps the most frequent.

The best text is what the model itself writes for its user; a list counted on anything else drafts less well, never
wrongly.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.errors import LingError
from vllm_ling.quant.convert_progress import ByteProgress, say
from vllm_ling.spec_decode.draft_vocab import MIN_ROWS, DraftVocab, tokenizer_hash
from vllm_ling.spec_decode.text_files import check_text_file, read_texts

_BATCH = 1 << 20  # bytes of text handed to the tokenizer at once, which spreads them over the cores


def run(model: str, files: Sequence[Path], rows: int, out: Path) -> None:
    """Counts `files` and writes the `rows` most frequent tokens of `model` to `out`.

    Raises:
        LingError: naming the model, file (and line) or option.
    """
    folder = resolve_model(model)
    if folder is None:
        raise LingError(f"{model}: neither a folder nor a model in the local cache")
    for path in files:
        check_text_file(path)
    console = Console(stderr=True)
    with ByteProgress(console, sum(path.stat().st_size for path in files)) as progress:
        vocab, counts = count(folder, Path(model).name, files, rows, progress)
    vocab.save(out)
    say(
        console,
        f"{out}: {len(vocab.ids)} of {vocab.vocab_size} rows; they cover {vocab.counted['covered']:.2%} of "
        f"{vocab.counted['tokens']} tokens, among which {len(counts)} different ones",
    )


def count(
    folder: Path, name: str, files: Sequence[Path], rows: int, progress: ByteProgress
) -> tuple[DraftVocab, Counter[int]]:
    """The vocabulary of `rows` tokens counted in `files` for the model in `folder`, and all counts by id.

    Raises:
        LingError: naming the file (and line) or option.
    """
    known = tokenizer_hash(folder)
    if known is None:
        raise LingError(f"{folder}: no tokenizer.json; tokens are counted with the model's own tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = _json(folder / "config.json")
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise LingError(f"{folder / 'config.json'}: no vocab_size")
    kept = _always_kept(tokenizer, config, _json(folder / "generation_config.json"))
    least = max(MIN_ROWS, len(kept))
    if not least <= rows <= vocab_size:
        raise LingError(
            f"--rows {rows}: expected {least} to {vocab_size} ({len(kept)} tokens are kept in any case)"
        )
    counts, sources = Counter[int](), []
    for path in files:
        progress.describe(path.name)
        before = counts.total()
        for size, texts in _batches(path):
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                counts.update(encoding.ids)
            progress.advance(size)
        sources.append({"name": path.name, "bytes": path.stat().st_size, "tokens": counts.total() - before})
    if not counts:
        raise LingError("--from: the files hold no text to count")
    if max(counts) >= vocab_size:
        raise LingError(
            f"{folder}: tokenizer.json uses id {max(counts)}, config.json has vocab_size {vocab_size}"
        )
    ids = most_frequent(counts, rows, kept, vocab_size)
    covered = sum(counts[token] for token in ids) / counts.total()
    counted = {"model": name, "files": sources, "tokens": counts.total(), "covered": round(covered, 6)}
    return DraftVocab(vocab_size, known, ids, counted), counts


def most_frequent(counts: Mapping[int, int], rows: int, kept: set[int], vocab_size: int) -> list[int]:
    """The `rows` most frequent ids, ascending; `kept` are among them, and the lower of two equally frequent wins."""
    # Low ids are early merges of the tokenizer, so they are also the better guess among tokens never seen.
    ranked = sorted(range(vocab_size), key=lambda token: (token not in kept, -counts.get(token, 0), token))
    return sorted(ranked[:rows])


def _batches(path: Path) -> Iterator[tuple[int, list[str]]]:
    """`read_texts` in portions of about `_BATCH` bytes."""
    texts: list[str] = []
    size = 0
    for read, more in read_texts(path):
        texts += more
        size += read
        if size >= _BATCH:
            yield size, texts
            texts, size = [], 0
    yield size, texts


def _always_kept(tokenizer: Tokenizer, *configs: dict[str, Any]) -> set[int]:
    """Added tokens (roles, thinking, tools) and begin, end and padding: rare in plain text, certain in a chat."""
    kept = set(tokenizer.get_added_tokens_decoder())
    for config in configs:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(key)
            kept.update(
                token for token in (value if isinstance(value, list) else [value]) if token is not None
            )
    return kept


def _json(path: Path) -> dict[str, Any]:
    """A config file's object; empty if there is no such file.

    Raises:
        LingError: it is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LingError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise LingError(f"{path}: not a JSON object")
    return data
