# SPDX-License-Identifier: Apache-2.0
"""Facts from a checkpoint folder: config.json, safetensors headers, tokenizer files. Weights are never read."""

import json
from pathlib import Path
from typing import Any

from vllm_ling.checkpoint.headers import read_headers
from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.compat import ARCHITECTURE
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.text import clean
from vllm_ling.errors import LingError

_MAX_JSON = 16 << 20


def read_checkpoint(facts: Facts, model: str) -> None:
    """States `checkpoint.*` facts of a model name or folder, as far as it lies on this machine."""
    folder = resolve_model(model)
    if folder is None:
        reason = f"{clean(model, 200)}: neither a folder nor a model in the local cache"
        if "static" in facts.sources:  # what a server was started with may lie on another machine
            facts.put("problem.model", reason, "command line")
        facts.lacks("checkpoint.", reason)
        return
    facts.put("checkpoint.name", model, "as named")
    facts.put("checkpoint.folder", str(folder), "resolved model name")
    try:
        config = _json(folder / "config.json")
    except LingError as error:
        facts.put("problem.config", str(error), str(folder))
        facts.lacks("checkpoint.", str(error))
        return
    facts.put("_checkpoint.config", config, "config.json")
    architectures = config.get("architectures")
    ours = isinstance(architectures, list) and ARCHITECTURE in architectures
    facts.put("checkpoint.architectures", architectures, "config.json")
    facts.put("checkpoint.is_ling", ours, "config.json architectures")
    _tokenizer(facts, folder)
    if not ours:
        facts.lacks("checkpoint.", f"{model}: not a Ling checkpoint")
        return
    try:
        shape = LingShape.from_config(config)
        facts.put("_checkpoint.shape", shape, "config.json")
        facts.put("checkpoint.format", shape.fmt, "config.json quantization_config")
        facts.put("checkpoint.mtp_layers", shape.num_nextn_predict_layers, "config.json")
    except LingError as error:
        facts.put("problem.config", str(error), "config.json")
        facts.lacks("checkpoint.", str(error))
    try:
        headers = read_headers(folder)
    except LingError as error:
        facts.put("problem.headers", str(error), str(folder))
        facts.lacks("checkpoint.headers", str(error))
        return
    facts.put("_checkpoint.headers", headers, "safetensors headers")
    facts.put("checkpoint.tensors", len(headers), "safetensors headers")
    facts.put("checkpoint.bytes", sum(info.nbytes for info in headers.values()), "safetensors headers")
    head = headers.get("lm_head.weight")
    facts.put("checkpoint.head_dtype", head.dtype if head else None, "safetensors headers")


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise LingError(f"{path.name}: not a file")
        with path.open("rb") as file:
            text = file.read(_MAX_JSON + 1)
        if len(text) > _MAX_JSON:
            raise LingError(f"{path.name}: larger than {_MAX_JSON >> 20} MB")
        found = json.loads(text)
    except OSError as error:
        raise LingError(f"{path.name}: cannot be read ({error.strerror})") from None
    except LingError:
        raise
    except (ValueError, RecursionError):
        raise LingError(f"{path.name}: not valid JSON") from None
    if not isinstance(found, dict):
        raise LingError(f"{path.name}: not a JSON object")
    return found


def _tokenizer(facts: Facts, folder: Path) -> None:
    if (folder / "chat_template.jinja").exists():
        facts.put("checkpoint.chat_template", True, "chat_template.jinja")
        return
    try:
        config = _json(folder / "tokenizer_config.json")
    except LingError as error:
        facts.lacks("checkpoint.chat_template", str(error))
        return
    facts.put("checkpoint.chat_template", bool(config.get("chat_template")), "tokenizer_config.json")
