# SPDX-License-Identifier: Apache-2.0
"""Finds a model's files: the bundled tiny-ling, a folder, or a finished download in the Hugging Face cache."""

from pathlib import Path

TINY_LING = "tiny-ling"


def tiny_ling_path() -> Path:
    """Folder of the bundled tiny-ling checkpoint."""
    return Path(__file__).resolve().parent.parent / "tiny" / "model"


def resolve_model(name: str) -> Path | None:
    """Folder that holds the model's files, or None if it is not on this machine (nothing is downloaded)."""
    if name == TINY_LING and not Path(name).exists():
        return tiny_ling_path()
    if Path(name).is_dir():
        return Path(name)
    return _from_hub_cache(name)


def _from_hub_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # not installed, or not a repository name
        return None
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    return folder if any(folder.glob("*.safetensors")) else None
