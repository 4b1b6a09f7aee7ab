# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM knows by name, read from its source: importing it takes seconds and needs a working torch."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

_QUOTED_FLAG = re.compile(r'"(--?[a-z][a-z0-9-]*)"')


def vllm_folder() -> Path:
    """Where vLLM is installed.

    Raises:
        OSError: it is not.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise OSError("vllm is not installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def known_variables() -> frozenset[str]:
    """Names of `vllm.envs.environment_variables`.

    Raises:
        OSError: vLLM is not installed or its file cannot be read.
        SyntaxError: nor parsed.
    """
    text = (vllm_folder() / "envs.py").read_text(encoding="utf-8")
    known: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            keys = {
                key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
            if any(key.startswith("VLLM_") for key in keys):
                known |= keys
    return frozenset(known)


@functools.cache
def known_flags() -> frozenset[str]:
    """Flags of `vllm serve`, with their dashes: those quoted where the parser is built, and the frontend's fields.

    Raises:
        OSError: vLLM is not installed or its files cannot be read.
        SyntaxError: nor parsed.
    """
    folder = vllm_folder()
    known = set(_QUOTED_FLAG.findall((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8")))
    for path in sorted((folder / "entrypoints").rglob("cli_args.py")):
        text = path.read_text(encoding="utf-8")
        known |= set(_QUOTED_FLAG.findall(text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                known |= {f"--{f.id.replace('_', '-')}" for f in fields if isinstance(f, ast.Name)}
    if "--host" not in known or "--speculative-config" not in known:
        raise OSError("vLLM's flags are defined elsewhere in this version")
    return frozenset(known | {"--help", "-h", "-O"})
