# SPDX-License-Identifier: Apache-2.0
"""A serve command's words as settings, in the spellings that vLLM takes, with what cannot be read named."""

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SHORT = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
}
_SWITCHES = {
    "enforce_eager",
    "enable_prefix_caching",
    "enable_auto_tool_choice",
    "trust_remote_code",
    "disable_log_stats",
    "enable_sleep_mode",
    "async_scheduling",
    "strict",
}
# Take several words.
_LISTS = {"cudagraph_capture_sizes", "served_model_name"}
_OBJECTS = {
    "speculative_config",
    "additional_config",
    "hf_overrides",
    "kernel_config",
    "compilation_config",
}
_MAX_FILE = 1 << 20


@dataclass
class Flags:
    """What was typed: settings by name, the flags as spelled (without value), and what cannot be read.

    Values that read as JSON are what they say; everything else is text.
    """

    given: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_flags(words: Sequence[str]) -> Flags:
    """Reads `MODEL --name value`, `--name=value`, switches, `--no-name`, dotted and short names, `--config FILE`.

    A pasted command may begin with `vllm serve` or `vllm-ling serve`.
    """
    words = list(words)
    if words[:2] in (["vllm", "serve"], ["vllm-ling", "serve"]):
        del words[:2]
    flags = Flags()
    _read(words, flags)
    if (path := flags.given.pop("config", None)) is not None:
        typed = flags.given
        flags.given = {}
        _config_file(Path(str(path)), flags)
        flags.given |= typed
    return flags


def _read(words: list[str], flags: Flags) -> None:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-") or re.fullmatch(r"-\d.*", word):
            flags.given.setdefault("model", word)
            continue
        spelled, separator, text = _long(word).partition("=")
        flags.names.append(spelled.partition(".")[0])
        name = spelled.lstrip("-").replace("-", "_")
        if separator:
            _set(flags, name, text)
            continue
        values: list[str] = []
        while index < len(words) and not re.match(r"--|-[A-Za-z]", words[index]):
            if name.removeprefix("no_") in _SWITCHES or (values and name not in _LISTS):
                break
            values.append(words[index])
            index += 1
        if not values:
            _set(flags, name.removeprefix("no_"), "false" if name.startswith("no_") else "true")
        else:
            _set(flags, name, f"[{', '.join(values)}]" if name in _LISTS else values[0])


def _long(word: str) -> str:
    """`-cc.mode=3`, `-O3`, `-O=3` and `-tp` as vLLM takes them."""
    if level := re.fullmatch(r"-O=?(\d)", word):
        return f"--optimization-level={level[1]}"
    short = re.match(r"-[A-Za-z]+", word)
    if word.startswith("--") or short is None or short[0] not in _SHORT:
        return word
    return _SHORT[short[0]] + word[short.end() :]


def _set(flags: Flags, name: str, text: str) -> None:
    value = _value(text)
    *path, last = name.split(".")
    if not path and last in _OBJECTS and not isinstance(value, dict):
        if last == "compilation_config" and type(value) is int:  # its mode
            flags.given[last] = {"mode": value}
            return
        option = f"--{last.replace('_', '-')}"
        flags.problems.append(f"{option} {text[:80]}: not a JSON object like '{{\"name\": value}}'")
        return
    place = flags.given
    for part in path:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        place = inner
    known = place.get(last)
    place[last] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _config_file(path: Path, flags: Flags) -> None:
    """The settings of a YAML file; what was typed on the command line goes before them."""
    try:
        yaml: Any = importlib.import_module("yaml")  # vLLM's dependency, not this package's
        if not path.is_file() or path.stat().st_size > _MAX_FILE:
            raise OSError("not a file, or too large")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except ImportError:
        flags.problems.append(f"--config {path}: not read, PyYAML is not installed")
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:80]
        flags.problems.append(f"--config {path}: cannot be read ({reason})")
        return
    if not isinstance(found, dict):
        flags.problems.append(f"--config {path}: not a list of `name: value` lines")
        return
    for key, value in found.items():
        name = str(key).replace("-", "_")
        flags.names.append(f"--{str(key).replace('_', '-')}")
        flags.given["model" if name == "model_tag" else name] = value
