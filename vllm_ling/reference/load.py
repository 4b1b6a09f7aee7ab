# SPDX-License-Identifier: Apache-2.0
"""Reads a Ling checkpoint of any format (BF16, block FP8, FP4, INT4) into a float32 LingReference.

The format is taken from the tensors themselves, so that a wrong quantization_config cannot hide a wrong byte.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_ling.errors import LingError
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.model import LingReference


def from_checkpoint(
    folder: str | Path,
    device: str | torch.device = "cpu",
    ignore_clamps: bool = False,
    drop_expert: tuple[int, int] | None = None,
) -> LingReference:
    """The model of a checkpoint folder, dequantized, in evaluation mode.

    Args:
        folder: holds config.json and *.safetensors.
        device: where the float32 weights go.
        ignore_clamps, drop_expert: negative controls, see `LingReference`.

    Raises:
        LingError: a tensor or scale is missing, has the wrong shape or type, or is not part of the model.
    """
    path = Path(folder)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise LingError(f"{path}: config.json is missing")
    config = ReferenceConfig.from_dict(json.loads(config_file.read_text(encoding="utf-8")))
    model = LingReference(config, ignore_clamps, drop_expert)
    tensors = StoredTensors(path)
    state = {}
    for name, parameter in model.state_dict().items():
        if ".mlp.experts." in name:
            stem, projection = name.rsplit(".", 1)
            parts = [tensors.weight(f"{stem}.{e}.{projection}.weight") for e in range(config.num_experts)]
            value = torch.stack(parts)
        else:
            value = tensors.weight(name)
        if name.endswith("A_log"):
            value = value.flatten()
        if value.shape != parameter.shape:
            raise LingError(f"{path}: {name} has shape {list(value.shape)}, expected {list(parameter.shape)}")
        state[name] = value
    tensors.check_all_read()
    model.load_state_dict(state)
    return model.to(device).eval()


class StoredTensors:
    """All tensors of a folder's safetensors files, read on demand and ticked off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            handle = safe_open(str(file), framework="pt")
            self.files |= dict.fromkeys(handle.keys(), handle)
        self.unread = set(self.files)

    def read(self, name: str) -> Tensor:
        """The stored tensor."""
        if name not in self.files:
            raise LingError(f"{self.folder}: tensor {name} is missing")
        self.unread.discard(name)
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    def weight(self, name: str) -> Tensor:
        """The float32 value of an official weight name in whatever format it is stored."""
        if f"{name}_packed" in self.files:
            return self._int4(name)
        stored = self.read(name)
        if stored.dtype in (torch.uint8, torch.int8):
            from vllm_ling.quant.mxfp4 import dequantize_mxfp4

            scale = self.read(f"{name}_scale_inv")
            return dequantize_mxfp4(stored.view(torch.uint8), scale.view(torch.uint8), dtype=torch.float32)
        if stored.dtype == torch.float8_e4m3fn:
            if f"{name}_scale" in self.files:
                from vllm_ling.quant.row_fp8 import dequantize_row_fp8

                return dequantize_row_fp8(stored, self.read(f"{name}_scale").flatten(), torch.float32)
            from vllm_ling.quant.block_fp8 import dequantize_block_fp8

            return dequantize_block_fp8(stored, self.read(f"{name}_scale_inv"), dtype=torch.float32)
        if not stored.dtype.is_floating_point:
            raise LingError(f"{self.folder}: {name} has type {stored.dtype}, which no Ling format stores")
        return stored.float()

    def _int4(self, name: str) -> Tensor:
        from vllm_ling.quant.int4 import dequantize_int4

        shape = self.read(f"{name}_shape").tolist()
        value = dequantize_int4(self.read(f"{name}_packed"), self.read(f"{name}_scale"), torch.float32)
        if list(value.shape) != shape:
            raise LingError(f"{self.folder}: {name}_shape says {shape}, the packed data {list(value.shape)}")
        return value

    def check_all_read(self) -> None:
        """Refuses tensors that are no part of the model."""
        if self.unread:
            raise LingError(f"{self.folder}: tensor {min(self.unread)} is not part of the model")
