# SPDX-License-Identifier: Apache-2.0
"""The folder a conversion writes to: whose it is, what an interrupted run left there, files that appear whole."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError

MANIFEST = ".vllm-ling-quantize.json"
_PARTIAL = ".partial"


def claim(dst: Path, manifest: dict[str, Any], resume: bool) -> str | None:
    """Makes `dst` this run's folder and removes what an earlier run left, except finished files it may reuse.

    Args:
        manifest: `source` (lists of name, size, mtime), `options`, and `files`: all names that the run will write.
        resume: whether an earlier run with the same source and options may be continued.

    Returns:
        Why an earlier run's files were all removed, or None.

    Raises:
        LingError: the folder holds anything that neither this nor the earlier run wrote.
    """
    dst.mkdir(parents=True, exist_ok=True)
    present = {path.name for path in dst.iterdir()}
    old = _read_manifest(dst) if MANIFEST in present else None
    names = {MANIFEST, *manifest["files"], *old["files"]} if old else set()
    partials = {name + _PARTIAL for name in (MANIFEST, *names)}
    if foreign := sorted(present - names - partials):
        raise LingError(f"{dst}: not empty (it holds {foreign[0]}); choose a new or empty folder")
    reason = _restart_reason(old, manifest, resume) if old else None
    for name in present - {MANIFEST}:
        if reason or name not in manifest["files"]:
            (dst / name).unlink()
    with atomic(dst / MANIFEST) as path:
        path.write_text(json.dumps(manifest), encoding="utf-8")
    return reason


def release(dst: Path) -> None:
    """Ends the claim: the folder is complete."""
    (dst / MANIFEST).unlink()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` once its content is on the disk; removed if the block raises."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        yield partial
        partial.chmod(0o644)
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read_manifest(dst: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((dst / MANIFEST).read_text(encoding="utf-8"))
        sound = all(Path(name).name == name for name in manifest["files"])
        sound = sound and all(len(entry) == 3 for entry in manifest["source"])
        sound = sound and isinstance(manifest["options"], dict)
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise LingError(f"{dst / MANIFEST}: unreadable manifest; delete the folder and start again")
    return dict(manifest)


def _restart_reason(old: dict[str, Any], new: dict[str, Any], resume: bool) -> str | None:
    if not resume:
        return "resuming was not asked for"
    for option, value in new["options"].items():
        if old["options"].get(option) != value:
            return f"{option} is {value}, it was {old['options'].get(option)}"
    before, now = ({name: facts for name, *facts in manifest["source"]} for manifest in (old, new))
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return f"the source has changed ({changed[0]})" if changed else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
