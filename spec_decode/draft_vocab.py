# SPDX-License-Identifier: Apache-2.0
"""The file that says which tokens the draft may propose: format, writing, loading with validation. No torch, no vLLM.

A draft head of fewer rows reads fewer bytes. Output cannot change, as the target verifies with its full head; a token
outside the list is never drafted, which costs acceptance.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError

FORMAT, VERSION = "vllm-ling draft vocabulary", 1
# Below this even the end-of-text and role tokens do not fit.
MIN_ROWS = 8


@dataclass(frozen=True)
class DraftVocab:
    """A subset of a model's vocabulary.

    Attributes:
        vocab_size: rows of the model's full head.
        tokenizer: `tokenizer_hash` of the tokenizer that the tokens were counted with.
        ids: token ids, ascending.
        counted: where the counts come from: model, files with their tokens, share of the tokens that `ids` cover.
    """

    vocab_size: int
    tokenizer: str
    ids: list[int]
    counted: dict[str, Any]

    def save(self, path: Path) -> None:
        """Writes the file, one line of ids."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}) + "\n", encoding="utf-8"
        )


def load_draft_vocab(path: str | Path, vocab_size: int, tokenizer: str | None = None) -> DraftVocab:
    """Reads a file and checks it against the model it is to be used with.

    Args:
        vocab_size: of the model.
        tokenizer: `tokenizer_hash` of the model, None where it is not known.

    Raises:
        LingError: naming the file: unreadable, another format, or made for another model.
    """
    data = _read(path)
    if data["vocab_size"] != vocab_size:
        raise LingError(
            f"{path}: made for a vocabulary of {data['vocab_size']}, but the model's vocab_size is {vocab_size}; "
            "run vllm-ling draft-vocab with this model"
        )
    if tokenizer is not None and data["tokenizer"] != tokenizer:
        raise LingError(
            f"{path}: counted with another tokenizer than the model's; run vllm-ling draft-vocab with this model"
        )
    ids = data["ids"]
    if len(ids) < MIN_ROWS:
        raise LingError(f"{path}: too few rows: {len(ids)}, at least {MIN_ROWS} are needed")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise LingError(f"{path}: {token!r} is no token id between 0 and {vocab_size - 1}")
    if len(set(ids)) != len(ids):
        double = next(b for a, b in zip(sorted(ids), sorted(ids)[1:], strict=False) if a == b)
        raise LingError(f"{path}: token id {double} is listed twice")
    # Of equal logits the lowest id wins, in the full head and here.
    return DraftVocab(vocab_size, data["tokenizer"], sorted(ids), data["counted"])


def tokenizer_hash(folder: Path | None) -> str | None:
    """SHA-256 over the (id, token) pairs of a model's tokenizer.json, None where there is no such file.

    The file's own bytes would not do: saving it again changes the layout and not one token.

    Raises:
        LingError: the file is no tokenizer.
    """
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        vocab = data["model"]["vocab"]
        pairs = (
            vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, _) in enumerate(vocab))
        )
        tokens = {number: token for token, number in pairs}
        tokens.update((added["id"], added["content"]) for added in data.get("added_tokens", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LingError(f"{path}: not a tokenizer: {type(error).__name__}: {error}") from None
    text = json.dumps(sorted(tokens.items()))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _read(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LingError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise LingError(f"{path}: not JSON; expected a file written by vllm-ling draft-vocab") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LingError(f"{path}: not a draft vocabulary; expected a file written by vllm-ling draft-vocab")
    if data.get("version") != VERSION:
        raise LingError(f"{path}: version {data.get('version')!r}, this vllm-ling reads version {VERSION}")
    for name, kind in (("vocab_size", int), ("tokenizer", str), ("ids", list), ("counted", dict)):
        if not isinstance(data.get(name), kind):
            raise LingError(f"{path}: {name!r} is missing or no {kind.__name__}")
    return data
