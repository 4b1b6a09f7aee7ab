# SPDX-License-Identifier: Apache-2.0
"""tiny-ling widened by zeros: the same function, trained as before, in shapes that two ranks and every kernel take.

tiny-ling's two heads and narrow experts can neither be split in blocks of 128 rows nor be read by the decode kernels.
Heads and columns of zeros add nothing to what a layer computes, and an expert whose bias is far below the others' is
never chosen.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.quant.convert import run as quantize
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.model import LingReference
from vllm_ling.reference.save import save_checkpoint

NAME = "tiny-ling-wide"
WIDER = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
}
NEVER_CHOSEN = -8.0  # scores are between 0 and 1


def widen(folder: Path) -> Path:
    """Writes tiny-ling in the wider shapes, in its own FP4 format and with its tokenizer, and returns `folder`."""
    source = tiny_ling_path()
    config = json.loads((source / "config.json").read_text()) | WIDER
    del config["quantization_config"]
    narrow, wide = from_checkpoint(source), LingReference(ReferenceConfig.from_dict(config))
    wanted, groups = wide.state_dict(), config["n_group"]
    wide.load_state_dict(
        {name: _wider(name, value, wanted[name], groups) for name, value in narrow.state_dict().items()}
    )
    plain = folder.with_name(f"{folder.name}-bf16")
    save_checkpoint(wide, config, plain)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, plain)
    quantize(plain, folder, fmt="fp4")
    shutil.rmtree(plain)
    return folder


def _wider(name: str, value: Tensor, wanted: Tensor, groups: int) -> Tensor:
    routed = ".mlp.experts." in name or ".gate." in name
    padded = torch.full_like(wanted, NEVER_CHOSEN if name.endswith("expert_bias") else 0.0)
    if routed:  # each group gets experts of its own
        value, inside = value.unflatten(0, (groups, -1)), padded.unflatten(0, (groups, -1))
    else:
        inside = padded
    inside[tuple(slice(size) for size in value.shape)] = value
    return padded


if __name__ == "__main__":
    Console().print(widen(Path(sys.argv[1])))
