# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm-ling bench kernels` and writes its result."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError


def kernels(against: str | None, out: Path) -> int:
    """Measures, prints a table and writes `{"provenance", "bandwidth", "rows"}` to `out`. Returns the exit code.

    Args:
        against: "stock" also measures vLLM's own path, which needs vLLM and about 25 GB of GPU memory more.
        out: JSON file; written at the end, and once before vLLM is started so that nothing is lost if that fails.

    Raises:
        LingError: no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise LingError("bench kernels: torch sees no CUDA device")
    from vllm_ling.bench.dram import moe_block_bytes
    from vllm_ling.bench.kernels import gemv_rows, moe_rows, stock_rows, with_stock
    from vllm_ling.eval.provenance import provenance
    from vllm_ling.roofline.machines import measure

    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    device = torch.device("cuda", torch.cuda.current_device())
    memory = measure()
    say(f"copy: {memory.bandwidth / 1e12:.2f} TB/s ({memory.source})")
    rows = moe_rows(device, memory.bandwidth, say)
    rows[0].dram_bytes = moe_block_bytes()
    say(f"moe_block, 1 token: {rows[0].dram_bytes or 'unknown'} bytes from DRAM, floor {rows[0].floor_bytes}")
    rows += gemv_rows(device, memory.bandwidth, say)
    torch.cuda.empty_cache()
    result: dict[str, Any] = {"provenance": provenance(), "bandwidth": memory.bandwidth}

    def save(stock: dict[tuple[str, int], float]) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result | {"rows": with_stock(rows, stock)}, indent=1) + "\n")

    save({})
    if against == "stock":
        from vllm_ling.bench.engine import inside, model_folder, start

        with tempfile.TemporaryDirectory() as folder:
            say("starting vLLM on 18 layers of random weights")
            llm = start(model_folder(Path(folder), "flash", 18), {"moe": "ling"}, enforce_eager=True)
            stock, more = inside(llm, lambda model: stock_rows(model, say))
        rows += more
        save(stock)
    for row in rows:
        print(
            f"{row.kernel:16} {row.tokens:5} tokens  {row.us:8.1f} us"
            + (f"  floor {row.floor_us:6.1f}" if row.floor_us else " " * 14)
            + (f"  vLLM {row.stock_us:8.1f} ({row.stock_us / row.us:.2f} x)" if row.stock_us else "")
            + (f"  RMS {row.rms_error:.1e}" if row.rms_error else "")
        )
    print(f"written: {out}")
    return 0
