# SPDX-License-Identifier: Apache-2.0
"""An in-process vLLM engine on flash's shapes with `SeededWeights`, loaded as a checkpoint is, and its requests."""

import json
from pathlib import Path
from typing import Any

from vllm_ling.bench.engine import model_folder
from vllm_ling.bench.engine import start as start_engine
from vllm_ling.eval.studies.seeded_weights import SeededWeights, write_headers

LOAD_FORMAT = "seeded"


def seeded_folder(folder: Path, model: str, layers: int) -> Path:
    """A checkpoint folder without data; "flash" or "mini", see `model_folder`. It has an MTP layer and no clamps."""
    return write_headers(model_folder(folder, model, layers, mtp=True))


def our_options() -> dict[str, Any]:
    """The `ling` section with every kernel of ours on."""
    from vllm_ling.options import LingOptions

    options = {"moe": "ling", "linear": "ling"}
    return options | ({"decode": "fused"} if "decode" in LingOptions.model_fields else {})


def start(folder: Path, options: dict[str, Any] | None, draft_tokens: int = 0, **engine: Any) -> Any:
    """The engine; `options` is the `ling` section, None leaves it out (stock vLLM)."""
    from vllm_ling.hf_config import register_hf_config

    register_hf_config()
    _register_loader()
    if draft_tokens:
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": draft_tokens}
    settings: dict[str, Any] = {"load_format": LOAD_FORMAT, "max_num_seqs": 8}
    return start_engine(folder, options, **(settings | engine))


def _register_loader() -> None:
    import torch
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            config = json.loads(Path(model_config.model, "config.json").read_text(encoding="utf-8"))
            device = next(model.parameters()).device
            weights = SeededWeights(config, device)
            with torch.no_grad():
                model.load_weights(weights.tensors(draft="MTP" in type(model).__name__))

    register_model_loader(LOAD_FORMAT)(SeededLoader)


class Requests:
    """Requests of token ids sent to a running engine step by step, with aborts in between."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[dict[int, float]]] = {}
        self.running: set[str] = set()

    def add(self, name: str, prompt: list[int], max_tokens: int, logprobs: int | None = None) -> None:
        """Starts a greedy request; `name` must be new. End tokens do not end it."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        self.running.add(name)
        self.tokens[name], self.logprobs[name] = [], []

    def abort(self, name: str) -> None:
        """Ends a request early."""
        self._engine.abort_request([name])
        self.running.discard(name)

    def step(self) -> list[str]:
        """One engine step; returns the requests that finished in it."""
        finished = []
        for output in self._engine.step():
            name, answer = output.request_id, output.outputs[0]
            if name not in self.running:
                continue  # the last step of an aborted request
            self.tokens[name] = list(answer.token_ids)
            if answer.logprobs:
                self.logprobs[name] = [
                    {token: entry.logprob for token, entry in position.items()}
                    for position in answer.logprobs
                ]
            if output.finished:
                self.running.discard(name)
                finished.append(name)
        return finished

    def forget(self, name: str) -> tuple[list[int], list[dict[int, float]]]:
        """Tokens of a request that is over, and the log-probabilities with each; they are not kept any longer."""
        return self.tokens.pop(name), self.logprobs.pop(name)

    def finish(self) -> None:
        """Steps until nothing runs."""
        while self.running:
            self.step()
