# SPDX-License-Identifier: Apache-2.0
"""DRAM bytes that one launch reads, by the hardware counters of Nsight Compute. Also the program that it watches."""

import csv
import io
import shutil
import subprocess
import sys

_METRIC = "dram__bytes_read.sum"


def moe_block_bytes() -> int | None:
    """Bytes that one MoE block launch of one token reads, caches flushed before; None if no counter can be read."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return None
    command = [ncu, "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", _METRIC]
    command += ["-k", "moe_block", "-s", "2", "-c", "1", sys.executable, "-m", "vllm_ling.bench.dram"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    for entry in csv.DictReader(io.StringIO("\n".join(lines))):
        if entry.get("Metric Name") == _METRIC:
            return int(float(entry["Metric Value"].replace(",", "")))
    return None


def _launch() -> None:
    import torch

    from vllm_ling.bench.layers import FLASH, random_moe_layer
    from vllm_ling.quant.decode_moe import MoEDecoder
    from vllm_ling.quant.jit import default_cache, gpu_of

    device = torch.device("cuda")
    w = random_moe_layer(FLASH, device)
    x = torch.randn(1, FLASH.hidden, device=device, dtype=torch.float32).bfloat16()
    decoder = MoEDecoder(FLASH, gpu_of(device), device, default_cache())
    for _ in range(3):
        decoder(x, w, torch.empty_like(x), 2.5, 0.0, 0.0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    _launch()
