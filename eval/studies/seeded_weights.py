# SPDX-License-Identifier: Apache-2.0
"""Random weights of any Ling shape in the FP4 format, a function of each tensor's name: equal in every process.

Three properties make them fit to compare engines. Values are of sensible size, so that every layer moves the hidden
state and none drowns it. The router is decisive: every token belongs to a topic, whose direction is part of its
embedding, and each layer sends a topic to experts of its own by a wide margin. With unstructured weights a rounding
error picks another expert for every second token, and that drowns what is to be seen. And the greedy continuation is
known: the head's best token after `t` is `successor(t)` by a wide margin, so every engine is fed the same tokens
without being forced, while hidden states and the other logits still depend on everything. The MTP layer finds that
token for most tokens only (`draftable`), so drafts are partly accepted.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.checkpoint.tensors import TensorSpec, expected_tensors
from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.mxfp4 import dequantize_mxfp4

# A token's lane (id modulo LANES) never changes along its continuation: it tells sequences in one batch apart.
LANES = 8
_STRIDE = LANES * 1237
_EMBEDDING = 1.5  # RMS of an embedding; 12 layers together add about as much
_TOPIC = 0.6  # RMS of the topic's direction in an embedding whose own part has RMS 1
_CLEAR = (2.0, 4.0)  # router logits of a topic's experts, halfway down the layers; all others are around 0
_WEAK = 0.15  # share of the half of an embedding that its token does not use
_GAIN, _OUTPUT_GAIN = 1.0, 0.35
_CODE_RMS, _E2M1_RMS = 40.0, 2.93  # of the FP8 codes drawn here, and of equally likely FP4 codes
_EXPERT = re.compile(r"^(model\.layers\.(\d+)\.mlp\.experts)\.(\d+)\.(\w+)\.(weight|weight_scale_inv)$")


def successor(token: int, vocabulary: int) -> int:
    """The greedy token after `token`."""
    return (token + _STRIDE) % vocabulary


def continuation(token: int, count: int, vocabulary: int) -> list[int]:
    """The `count` greedy tokens after `token`."""
    found = []
    for _ in range(count):
        token = successor(token, vocabulary)
        found.append(token)
    return found


def draftable(tokens: Tensor) -> Tensor:
    """Whether the MTP layer finds the successor of each token: 7 in 10, in no regular order."""
    return ((tokens // LANES * 2654435761) % 2**32 >> 16) % 10 >= 3


def topic(tokens: Tensor, count: int) -> Tensor:
    """Which of the router's `count` topics each token belongs to."""
    return ((tokens + 1) * 2246822519 % 2**32 >> 12) % count


class SeededWeights:
    """The tensors of one `config.json` in the FP4 format.

    Args:
        device: where they are made; the values depend on the kind of device.
    """

    def __init__(self, config: dict[str, Any], device: torch.device | str) -> None:
        self.shape = LingShape.from_config(config)
        if self.shape.fmt != "fp4":
            raise ValueError(f"the format is {self.shape.fmt}, expected fp4")
        self.specs = expected_tensors(self.shape)
        self.device = torch.device(device)
        # An expert then has about one topic: more would blur the margins.
        self.topics = max(2, self.shape.num_experts // self.shape.num_experts_per_tok)

    def tensors(self, draft: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(official name, stored value) of all tensors but the MTP layer's, or of those that an MTP draft loads."""
        for name in self.specs:
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer is not None and (int(layer[1]) >= self.shape.num_hidden_layers) != draft:
                continue
            expert = _EXPERT.match(name)
            if expert is None:
                yield name, self.stored(name)
            elif expert[3] == "0" and expert[5] == "weight":
                codes, scales = self.experts(expert[1], expert[4])
                for index in range(self.shape.num_experts):
                    stem = f"{expert[1]}.{index}.{expert[4]}"
                    yield f"{stem}.weight", codes[index]
                    yield f"{stem}.weight_scale_inv", scales[index]

    def values(self, prefix: str) -> dict[str, Tensor]:
        """Float32 values of every tensor below `prefix` (which is cut off), experts stacked as in the reference."""
        found: dict[str, Tensor] = {}
        for name in self.specs:
            if not name.startswith(prefix) or name.endswith("_scale_inv"):
                continue
            expert = _EXPERT.match(name)
            if expert is None:
                found[name.removeprefix(prefix)] = self.value(name)
            elif expert[3] == "0":
                codes, scales = self.experts(expert[1], expert[4])
                found[f"{expert[1]}.{expert[4]}".removeprefix(prefix)] = dequantize_mxfp4(
                    codes, scales, dtype=torch.float32
                )
        return found

    def value(self, name: str) -> Tensor:
        """The float32 value of one tensor that is no expert's."""
        stored = self.stored(name)
        if stored.dtype != torch.float8_e4m3fn:
            return stored.float()
        return dequantize_block_fp8(stored, self.stored(f"{name}_scale_inv"), dtype=torch.float32)

    def stored(self, name: str) -> Tensor:
        """One tensor as a checkpoint holds it."""
        if name.endswith("_scale_inv"):
            return self._fp8(name.removesuffix("_scale_inv"))[1]
        if self.specs[name].dtypes == ("F8_E4M3",):
            return self._fp8(name)[0]
        dtype = torch.float32 if _header_dtype(name, self.specs[name]) == "F32" else torch.bfloat16
        return self._float(name).to(dtype)

    def experts(self, prefix: str, projection: str) -> tuple[Tensor, Tensor]:
        """uint8 codes [experts, rows, cols / 2] and E8M0 scales [experts, rows, cols / 32] of one projection."""
        rows, half = self.specs[f"{prefix}.0.{projection}.weight"].shape
        generator = self._generator(f"{prefix}.{projection}")
        shape = (self.shape.num_experts, rows, half)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=generator)
        gain = _OUTPUT_GAIN if projection == "down_proj" else _GAIN
        exponent = math.floor(math.log2(gain / _E2M1_RMS / math.sqrt(2 * half))) + 127
        shape = (self.shape.num_experts, rows, half // 16)
        scales = torch.randint(
            exponent, exponent + 2, shape, dtype=torch.uint8, device=self.device, generator=generator
        )
        return codes, scales

    def _fp8(self, name: str) -> tuple[Tensor, Tensor]:
        rows, cols = self.specs[name].shape
        if name.endswith("eh_proj.weight"):
            codes, scale = quantize_block_fp8(self._float(name))
            return codes, scale.to(torch.float8_e8m0fnu)
        generator = self._generator(name)
        noise = torch.randn(rows, cols, device=self.device, generator=generator, dtype=torch.float32)
        exponent = math.floor(math.log2(_gain(name) / _CODE_RMS / math.sqrt(cols))) + 127
        scale = torch.randint(
            exponent,
            exponent + 2,
            (-(-rows // 128), -(-cols // 128)),
            dtype=torch.uint8,
            device=self.device,
            generator=generator,
        )
        return (noise * _CODE_RMS).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)

    def _float(self, name: str) -> Tensor:
        if name == "model.word_embeddings.weight":
            topics = topic(torch.arange(self.shape.vocab_size, device=self.device), self.topics)
            return _EMBEDDING * (self._own() + _TOPIC * self._directions()[topics])
        if name == "lm_head.weight":
            # Row successor(t) is what only t's embedding has, scaled so that logits of other tokens are about 1.
            return self._own().roll(_STRIDE, 0) / math.sqrt(self.shape.hidden_size)
        size = self.specs[name].shape
        noise = torch.randn(size, device=self.device, generator=self._generator(name), dtype=torch.float32)
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":
            return noise * 0.3
        if leaf == "dt_bias":
            return noise * 0.5 - 1
        if leaf == "expert_bias":
            return noise * 0.05
        if name.endswith("gate.weight"):
            return self._router(noise, self._generator(f"{name} topics"))
        if "norm" in name:
            return 1 + 0.1 * noise
        if "conv1d" in name:
            return noise * 0.5
        if name.endswith("eh_proj.weight"):
            # The half of the embedding that draftable tokens use, and some of the hidden state before.
            eye = torch.eye(size[0], device=self.device, dtype=torch.float32)
            own = eye * (torch.arange(size[0], device=self.device) < size[0] // 2)
            return torch.cat([own, 0.15 * eye], 1) + noise * 0.1 / math.sqrt(size[1])
        return noise * _gain(name) / math.sqrt(size[-1])

    def _router(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Rows whose logits are `_CLEAR` for the experts that a topic has in this layer."""
        shape = self.shape
        size = (self.topics, shape.n_group, shape.num_experts // shape.n_group)
        score = torch.rand(size, device=self.device, generator=generator, dtype=torch.float32)
        each = shape.num_experts_per_tok // shape.topk_group
        best = torch.zeros_like(score).scatter(-1, score.topk(each).indices, 1.0)
        groups = score.sum(-1).topk(shape.topk_group).indices
        best *= torch.zeros_like(score[..., 0]).scatter(-1, groups, 1.0).unsqueeze(-1)
        low, high = _CLEAR
        wanted = (best * (low + (high - low) * score)).flatten(1)
        reach = 0.5 * _TOPIC * shape.hidden_size  # of a topic's direction in a normalized hidden state
        return wanted.T @ self._directions() / reach + 0.2 * noise / math.sqrt(shape.hidden_size)

    def _directions(self) -> Tensor:
        size = (self.topics, self.shape.hidden_size)
        return torch.randn(size, device=self.device, generator=self._generator("topics"), dtype=torch.float32)

    def _own(self) -> Tensor:
        """What an embedding does not share with others of its topic, RMS 1."""
        size = (self.shape.vocab_size, self.shape.hidden_size)
        generator = self._generator("model.word_embeddings.weight")
        noise = torch.randn(size, device=self.device, generator=generator, dtype=torch.float32)
        first = torch.arange(size[1], device=self.device) < size[1] // 2
        used = draftable(torch.arange(size[0], device=self.device)).unsqueeze(1) == first
        noise *= (_WEAK + (1 - _WEAK) * used.float()) / math.sqrt((1 + _WEAK**2) / 2)
        return noise

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))


def _gain(name: str) -> float:
    return _OUTPUT_GAIN if re.search(r"\.(o_proj|dense|down_proj)\.", name) else _GAIN


def _header_dtype(name: str, spec: TensorSpec) -> str:
    if name.rpartition(".")[2] in ("A_log", "dt_bias", "expert_bias"):
        return "F32"
    return {"F8_E8M0": "F8_E8M0", "BF16": "BF16"}.get(spec.dtypes[0], spec.dtypes[0])


def write_headers(folder: Path) -> Path:
    """Adds a safetensors file to a folder with a `config.json`: a true header, and a hole in place of the data.

    The plugin checks a checkpoint by its headers before it is loaded; the hole takes no space.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {"F32": 4, "BF16": 2}
    header: dict[str, Any] = {}
    end = 0
    for name, spec in expected_tensors(LingShape.from_config(config)).items():
        dtype = _header_dtype(name, spec)
        begin, end = end, end + math.prod(spec.shape) * sizes.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder
