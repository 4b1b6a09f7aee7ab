# SPDX-License-Identifier: Apache-2.0
"""Prints the log of an `LLM` on 6 layers of full size with random weights: `python -m tests.doctor.capture_engine mtp`.

What a benchmark leaves behind: no server, no tokenizer, dummy weights and, with drafts, synthetic acceptance. `mtp` has
the engine in this process, `plain` in one of its own.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = "/models/flash"
LAYERS, PROMPT, TOKENS = 6, 128, 64
MTP = {
    "method": "mtp",
    "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.68,
}


def main(kind: str) -> None:
    """Starts the engine, decodes one sequence and ends."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(kind == "plain")),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from vllm_ling.bench.engine import model_folder
    from vllm_ling.hf_config import register_hf_config

    register_hf_config()
    more: dict[str, Any] = {"speculative_config": MTP} if kind == "mtp" else {}
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder), "flash", LAYERS, mtp=kind == "mtp")
        print(f"capture: {model} stands for {MODEL}", flush=True)
        llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=480,
            max_num_batched_tokens=4096,
            max_num_seqs=1,
            gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=8 << 30,  # other engines may start on the same GPU
            enable_prefix_caching=False,
            seed=0,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
            additional_config={"ling": {"moe": "ling", "linear": "ling", "decode": "fused"}},
            **more,
        )
        prompt = TokensPrompt(prompt_token_ids=[17 + 31 * place for place in range(PROMPT)])
        answer = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        llm.generate([prompt], answer, use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])
