# SPDX-License-Identifier: Apache-2.0
"""Part `kernels`: on real layers, the GPU kernels and the plugin's torch paths against the fp32 reference.

Both sides read the same bytes, so this finds a wrong computation and not a wrong checkpoint; what can be said of the
bytes themselves is said beside it (`stored_bytes`).
"""

import json
from typing import Any

import torch
import torch.nn.functional as F

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.finding import Outcome
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.load import StoredTensors
from vllm_ling.verify import gpu_kernels
from vllm_ling.verify.finding import Finding, judged
from vllm_ling.verify.head_layer import head_method, head_source
from vllm_ling.verify.real_layers import RealLayer, sampled_layers
from vllm_ling.verify.settings import Verification
from vllm_ling.verify.stored_bytes import (
    check_digests,
    check_other_source,
    check_scales,
    files_of,
    relative_rms,
)

_TOKENS = 4
# FP32 sums in another order; measured 3e-7. A scale that is off by one exponent gives 0.1 and more.
_FP32 = 1e-5
# BF16 keeps 8 bits (relative RMS 1.7e-3 a rounding), and four roundings follow each other.
_BF16 = 1e-2
_FIX = 'report it with this page; until then serve with --additional-config \'{"ling": {"moe": "auto"}}\''
_DAMAGED = "the checkpoint is damaged: download the named files again"
_STANDS_OUT = "compare the named tensors with another download: --reference FOLDER"


def run(what: Verification) -> Finding:
    """Unknown on a machine without a GPU, whatever the torch paths show, unless something is wrong already."""
    stored = StoredTensors(what.folder)
    config = _config(what)
    other = what.reference_folder
    kept = StoredTensors(other) if other else None
    problems: list[tuple[Outcome, str]] = []
    damaged: list[tuple[Outcome, str]] = []
    odd: list[tuple[Outcome, str]] = []
    said: list[str] = []
    figures: dict[str, Any] = {"layers": {}}
    layers = sampled_layers(config, what.layers)
    if what.device == "cuda":
        torch.zeros(1, device="cuda")  # creates the context that the kernels' driver calls need
    files = files_of(what.folder, "lm_head.")
    for index in layers:
        layer = RealLayer(stored, config, index)
        files |= files_of(what.folder, f"model.layers.{index}.")
        row: dict[str, Any] = {"clamp": layer.limit, "torch": torch_errors(layer, what.shape.fmt)}
        problems += _beyond(f"layer {index}", row["torch"])
        found, row["scales"] = check_scales(stored, what.shape, index)
        odd += found
        if kept is not None and other is not None:
            formats = (what.shape.fmt, LingShape.from_folder(other).fmt)
            every = list(range(config.num_experts)) if config.num_experts <= 64 else _some_experts(layer)
            found, row["to_other_source"] = check_other_source(stored, kept, formats, config, index, every)
            damaged += found
        if what.device == "cuda":
            row["gpu"], missing = gpu_kernels.moe_errors(layer, what.shape, torch.device("cuda"))
            problems += gpu_kernels.beyond(f"layer {index}", row["gpu"])
            problems += [("unknown", f"layer {index}: {reason}") for reason in missing]
        figures["layers"][str(index)] = row
    figures["head"] = head_errors(stored, torch.device("cpu"))
    problems += _beyond("lm_head", figures["head"])
    said.append(f"torch paths on layers {', '.join(map(str, layers))} and the head: {_worst_torch(figures)}")
    if what.device == "cuda":
        figures["gpu_head"], missing = gpu_kernels.head_errors(stored, torch.device("cuda"))
        problems += gpu_kernels.beyond("lm_head", figures["gpu_head"])
        problems += [("unknown", reason) for reason in missing]
        said.append(f"GPU kernels: {gpu_kernels.worst(figures)}")
    found, words = check_digests(files)
    if not found and kept is None and words[0].startswith("no digests"):
        words[0] += ": bytes changed on the way show in gsm8k only"
    said += words
    damaged += found
    if what.device == "cpu":
        problems.append(("unknown", "no NVIDIA GPU here, so no GPU kernel was run"))
    fixes = [
        _DAMAGED if damaged else "",
        _STANDS_OUT if odd else "",
        _FIX if any(kind == "fail" for kind, _ in problems) else "",
        "run this part on the GPU's machine" if what.device == "cpu" else "",
    ]
    return judged("kernels", [*problems, *damaged, *odd], said, figures, "; ".join(filter(None, fixes)))


def torch_errors(layer: RealLayer, fmt: str) -> dict[str, float]:
    """Relative RMS of the plugin's torch experts to the reference, by dtype and form; the shared expert left out."""
    x = layer.inputs(_TOKENS)
    weights, ids = layer.route(x)
    exact = layer.routed(x, weights, ids)
    errors = {}
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for at_load, form in ((True, "torch"), (False, "reference")):
            ours = layer.torch_path(fmt, x, weights, ids, dtype, at_load)
            errors[f"{form} {name}"] = relative_rms(ours, exact)
    return errors


def head_errors(stored: StoredTensors, device: torch.device) -> dict[str, float]:
    """Relative RMS of the plugin's FP8 head to an fp32 product of the same bytes, on random hidden states."""
    from vllm_ling.quant.block_fp8 import dequantize_block_fp8

    method, layer = head_method(stored, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_TOKENS, layer.weight.shape[1], generator=generator, dtype=torch.float32).bfloat16()
    scale = method.scale(layer).data
    errors = {}
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        ours = method.apply(layer, x.to(device, dtype))
        if head_source(stored) == "fp8_block":
            exact = F.linear(x.float().to(device), dequantize_block_fp8(layer.weight.data, scale))
        else:
            exact = F.linear(x.float().to(device), layer.weight.data.float()) * scale
        errors[name] = relative_rms(ours, exact)
    return errors


def _config(what: Verification) -> ReferenceConfig:
    text = (what.folder / "config.json").read_text(encoding="utf-8")
    return ReferenceConfig.from_dict(json.loads(text))


def _some_experts(layer: RealLayer) -> list[int]:
    """Those that the layer's inputs are routed to."""
    return sorted(layer.route(layer.inputs(_TOKENS))[1].unique().tolist())


def _beyond(where: str, errors: dict[str, float]) -> list[tuple[Outcome, str]]:
    found: list[tuple[Outcome, str]] = []
    for name, error in errors.items():
        bound = _FP32 if name.endswith("float32") else _BF16
        if not error <= bound:
            found.append(
                ("fail", f"{where}: the torch path ({name}) is {error:.3g} (relative RMS) from the reference")
            )
    return found


def _worst_torch(figures: dict[str, Any]) -> str:
    every = [*(row["torch"] for row in figures["layers"].values()), figures["head"]]
    words = []
    for dtype in ("float32", "bfloat16"):
        found = [error for row in every for name, error in row.items() if name.split()[-1] == dtype]
        words.append(f"{dtype} at most {max(found):.1e}")
    return f"{', '.join(words)} (relative RMS) from the reference on the same bytes"
