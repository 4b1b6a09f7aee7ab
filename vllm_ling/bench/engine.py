# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM on flash's shapes with random weights made on the GPU, and runs measurements inside it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ling.checkpoint.synthetic import mini_config
from vllm_ling.errors import LingError
from vllm_ling.roofline.models import PUBLISHED


def model_folder(folder: Path, model: str, layers: int, mtp: bool = False, **overrides: Any) -> Path:
    """A folder with a `config.json` in FP4 and no weights.

    Args:
        model: "flash" (Ling-3.0-flash cut to `layers` layers, without clamps) or "mini" (the same structure, small).
        overrides: replace entries of `config.json`.
    """
    published: dict[str, Any] = {}
    if model == "flash":
        published = {k: v for k, v in PUBLISHED["flash"].items() if not k.endswith("_limit_list")}
    published |= {"num_hidden_layers": layers, "num_nextn_predict_layers": int(mtp)}
    # The longest prompts must fit the small model too.
    published["max_position_embeddings"] = PUBLISHED["flash"]["max_position_embeddings"]
    config = mini_config("flash", "fp4", mtp, 0.0, **published | overrides)
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        config[name] = [0] * layers
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def start(folder: Path, options: dict[str, Any] | None = None, **engine: Any) -> Any:
    """An in-process `LLM` on `folder` with random weights; `options` is the `ling` section."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    from vllm import LLM

    from vllm_ling.status import STATUS

    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if options is not None:
        settings["additional_config"] = {"ling": options}
    llm = LLM(model=str(folder), **(settings | engine))
    if options is not None and STATUS.state != "active":
        # Without this, stock vLLM would be measured under our name.
        raise LingError(
            f"the plugin is {STATUS.state} in the engine's process ({STATUS.reason or 'no entry point was found'}); "
            "install vllm-ling so that vLLM finds it, or set PYTHONPATH to where its metadata lies"
        )
    return llm


def inside(llm: Any, function: Callable[[Any], Any]) -> Any:
    """Runs `function(model)` in the worker, in a forward context, and returns its result."""
    from vllm.forward_context import set_forward_context

    config = llm.llm_engine.vllm_config

    def run(model: Any) -> Any:
        with set_forward_context(None, config):
            return function(model)

    return llm.apply_model(run)[0]
