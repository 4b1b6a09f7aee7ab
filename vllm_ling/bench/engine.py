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


def start(
    folder: Path, options: dict[str, Any] | None = None, own_process: bool = False, **engine: Any
) -> Any:
    """An `LLM` on `folder` with random weights.

    Args:
        options: the `ling` section; None leaves it out.
        own_process: run the engine in a process of its own, as `vllm serve` and `LLM` do by default; it is reached with
            `remote.ask` and ends with this one. Otherwise it is in this process, which `inside` needs.

    Raises:
        LingError: there are options, and the plugin is not active where the engine is.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    if own_process:
        # Lets functions travel to the engine; nobody but this process can reach its sockets.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    from vllm_ling.bench.looks import plugin, tie
    from vllm_ling.bench.remote import ask

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
    if own_process:
        ask(llm, tie)
    state, reason = ask(llm, plugin)
    if options is not None and state != "active":
        # Without this, stock vLLM would be measured under our name.
        raise LingError(
            f"the plugin is {state} in the engine's process ({reason or 'no entry point was found'}); "
            "install vllm-ling so that vLLM finds it, or set PYTHONPATH to where its metadata lies"
        )
    return llm


def inside(llm: Any, function: Callable[[Any], Any]) -> Any:
    """Runs `function(model)` in the worker, in a forward context, and returns its result. Not with `own_process`."""
    from vllm.forward_context import set_forward_context

    config = llm.llm_engine.vllm_config

    def run(model: Any) -> Any:
        with set_forward_context(None, config):
            return function(model)

    return llm.apply_model(run)[0]
