# SPDX-License-Identifier: Apache-2.0
"""A model folder without weights, which a server fills with random ones: speed can be measured without a checkpoint.

It holds a `config.json` of full size, a tokenizer over the whole vocabulary, and the config class that stock vLLM
has but does not know by the model's type. The weights are vLLM's own dummy values, made where the model is loaded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

from vllm_ling.bench.engine import model_folder
from vllm_ling.eval.files import write_json, write_text
from vllm_ling.tiny.assets import MODEL_DIR
from vllm_ling.tiny.tokenizer import VOCAB_SIZE

Shape = Literal["flash", "mini"]
LAYERS: dict[Shape, int] = {"flash": 42, "mini": 6}
# Stock vLLM meets the model as it meets the published one, whose folder brings its config class along.
STOCK_FLAGS = ("--trust-remote-code",)
_CONFIG_CLASS = "BailingMoeV3TextConfig"
_CONFIG_MODULE = "configuration_ling"
_CONFIG_SOURCE = f"""# The class is vLLM's own; a checkpoint's folder is where vLLM looks for it.
from vllm.transformers_utils.configs.bailing_moe_v3_vl import {_CONFIG_CLASS}  # noqa: F401
"""


@dataclass(frozen=True)
class RandomModel:
    """Which model to make: "flash" (Ling-3.0-flash without clamps, as `vllm-ling bench decode` has it) or "mini"."""

    shape: Shape
    layers: int

    @property
    def name(self) -> str:
        """The served name, which no result can be mistaken by."""
        cut = "" if self.layers == LAYERS[self.shape] else f"-{self.layers}-layers"
        return f"{self.shape}{cut}-random-weights"

    def serve_flags(self, folder: Path, longest: int) -> list[str]:
        """MODEL and flags of a server for one request of up to `longest` tokens at a time."""
        words = [
            str(folder),
            "--served-model-name",
            self.name,
            "--load-format",
            "dummy",
            "--dtype",
            "bfloat16",
        ]
        return [*words, "--max-num-seqs", "1", "--max-model-len", str(longest)]

    def write(self, folder: Path) -> Path:
        """Writes the folder and returns it; a second call writes the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        # Small, but with room for every token that tiny-ling's tokenizer makes of a text.
        small: dict[str, Any] = {} if self.shape == "flash" else {"vocab_size": VOCAB_SIZE}
        auto_map = {"AutoConfig": f"{_CONFIG_MODULE}.{_CONFIG_CLASS}"}
        model_folder(folder, self.shape, self.layers, mtp=True, auto_map=auto_map, **small)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_text(folder / f"{_CONFIG_MODULE}.py", _CONFIG_SOURCE)
        settings = _tiny("tokenizer_config.json")
        # vLLM takes no longer prompts than the tokenizer says.
        write_json(
            folder / "tokenizer_config.json",
            settings | {"model_max_length": config["max_position_embeddings"]},
        )
        write_json(folder / "tokenizer.json", widened(_tiny("tokenizer.json"), int(config["vocab_size"])))
        return folder


def _tiny(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODEL_DIR / file).read_text(encoding="utf-8"))
    return found


def widened(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer with a made-up word for every id up to `size` that it lacks.

    No text becomes such a word, as no merge leads to it; but every id that a model of random weights says is one, so
    that answers are streamed as words, as a trained model's are.
    """
    vocabulary = dict(tokenizer["model"]["vocab"])
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    for number in sorted(set(range(size)) - taken):
        vocabulary[f"\u0120zz{_letters(number)}"] = number  # U+0120 stands for a space
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": vocabulary}}


def _letters(number: int) -> str:
    word = ""
    while number or not word:
        number, digit = divmod(number, len(ascii_lowercase))
        word += ascii_lowercase[digit]
    return word


def stock_flags(stages: Sequence[str], flags: dict[str, str]) -> dict[str, str]:
    """`flags` (by stage, as typed) with what stock vLLM needs for this folder."""
    if "stock" not in stages:
        return flags
    return {**flags, "stock": " ".join([*STOCK_FLAGS, flags.get("stock", "")]).strip()}
