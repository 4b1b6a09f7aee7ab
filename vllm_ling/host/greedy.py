# SPDX-License-Identifier: Apache-2.0
"""Greedy decode steps take the head's best rows, and write no logits.

vLLM's V2 runner lets a batch without sampling parameters pass through everything that one with them needs: logits, a
Gumbel kernel that adds no noise, two reductions, a kernel that counts one token per request; for drafts, statistics of
every logit, a rejection kernel, a resampling kernel, and one that inserts what was not resampled. Where every request
of a batch is plain and greedy, its tokens are the best rows of the head (lowest id on ties, as in vLLM's kernels), a
draft is accepted where it is one (with vLLM's synthetic acceptance: by lot), and a request gets one token more than it
has accepted drafts. Any other batch is vLLM's.
"""

import inspect
from typing import Any

import numpy as np
import torch

from vllm_ling.status import choose

_WHAT = "greedy sampling"
_SAMPLE = ["self", "hidden_states", "input_batch", "grammar_output"]
_OUTPUT = {"sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"}


class GreedySampling:
    """Which batches of one runner are plain and greedy, and their tokens.

    Args:
        model: `best_tokens` gives int64 [tokens] of hidden states [tokens, hidden], or None.
        sampler: vLLM's; its `add_request` is followed.
    """

    def __init__(self, model: Any, sampler: Any) -> None:
        self._model, self._sampler = model, sampler
        self._plain = np.zeros(len(sampler.needs_logits_processing), dtype=bool)
        self._drafts_problem: str | None = None  # not looked for yet
        self._constants: dict[Any, torch.Tensor] = {}
        add = sampler.add_request

        def add_request(slot: int, sampling_params: Any) -> None:
            self._plain[slot] = False  # also if it fails
            add(slot, sampling_params)
            self._plain[slot] = plain(sampler, slot)

        sampler.add_request = add_request

    def sample(self, runner: Any, hidden: torch.Tensor, batch: Any) -> tuple[Any, Any, Any] | None:
        """What `GPUModelRunner.sample` returns, or None where vLLM has to sample.

        Args:
            runner: vLLM's V2 model runner.
            hidden: BF16 [tokens, hidden] of the whole batch, padding included.
            batch: vLLM's `InputBatch`.
        """
        count, tokens = batch.num_reqs, batch.num_tokens
        if batch.has_prefill or not count or not self._plain[batch.idx_mapping_np].all():
            return None
        each = tokens // count
        drafts = each - 1
        if (batch.num_scheduled_tokens != each).any() or batch.num_draft_tokens != count * drafts:
            return None
        if drafts and (self._without_drafts(runner) or (batch.num_draft_tokens_per_req != drafts).any()):
            return None
        # Every token of every request, in order: what `logits_indices` says, too.
        best = self._model.best_tokens(hidden[:tokens])
        if best is None:
            return None
        sampled = best.view(count, each)
        if drafts:
            proposed = batch.input_ids[:tokens].view(count, each)[:, 1:]
            sampled, first_wrong = self._verify(runner, sampled, proposed)
            number, rejected = first_wrong + 1, drafts - first_wrong
        else:
            number, rejected = self._constant(1, count, best), self._constant(0, count, best)
        return _output(sampled, number, rejected), number, rejected

    def _verify(
        self, runner: Any, best: torch.Tensor, proposed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [requests, drafts + 1] and int32 [requests], the first draft that is not accepted.

        Args:
            best: int64 [requests, drafts + 1].
            proposed: int32 [requests, drafts].
        """
        drafts = proposed.shape[1]
        steps, rates = self._steps(drafts, best), runner.rejection_sampler.synthetic_conditional_rates
        if rates is None:
            return best, torch.where(best[:, :-1] == proposed, drafts, steps).amin(1)
        # Synthetic acceptance times rounds, whatever is right: by lot, and what is accepted is what was drafted.
        lucky = torch.rand(proposed.shape, device=best.device) < rates[:drafts]
        first_wrong = torch.where(lucky, drafts, steps).amin(1)
        tokens = best.clone()
        tokens[:, :-1] = torch.where(steps < first_wrong[:, None], proposed, best[:, :-1])
        return tokens, first_wrong

    def _without_drafts(self, runner: Any) -> str:
        if self._drafts_problem is None:
            self._drafts_problem = drafts_problem(runner)
            choice = "vLLM's" if self._drafts_problem else "best rows"
            choose(
                "greedy verification", choice, self._drafts_problem or "a draft is accepted where it is one"
            )
        return self._drafts_problem

    def _steps(self, drafts: int, like: torch.Tensor) -> torch.Tensor:
        """int32 [drafts]: 0, 1, ..."""
        if ("steps", drafts) not in self._constants:
            steps = torch.arange(drafts, dtype=torch.int32, device=like.device)
            self._constants["steps", drafts] = steps
        return self._constants["steps", drafts]

    def _constant(self, value: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """int32 [count]; nobody writes into what a sampler returns."""
        if (value, count) not in self._constants:
            self._constants[value, count] = torch.full((count,), value, dtype=torch.int32, device=like.device)
        return self._constants[value, count]


def _output(sampled: torch.Tensor, number: torch.Tensor, rejected: torch.Tensor) -> Any:
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    return SamplerOutput(
        sampled_token_ids=sampled,
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=number,
        num_rejected=rejected,
    )


def plain(sampler: Any, slot: int) -> bool:
    """Whether the request in `slot` takes the largest logit as it is and asks for nothing but the token."""
    states = sampler.sampling_states
    return bool(
        states.temperature.np[slot] == 0
        and states.top_k.np[slot] == states.vocab_size
        and states.top_p.np[slot] == 1
        and states.num_logprobs[slot] == -1
        and not sampler.needs_logits_processing[slot]
        and sampler.logprob_token_ids_state.num_token_ids.np[slot] == 0
    )


def drafts_problem(runner: Any) -> str:
    """Why verified drafts are left to vLLM, or ""."""
    rejection, speculator = runner.rejection_sampler, runner.speculator
    if type(rejection).__name__ != "RejectionSampler" or not type(rejection).__module__.startswith("vllm."):
        return f"drafts are judged by {type(rejection).__name__}"
    method = runner.speculative_config.rejection_sample_method
    if method not in ("standard", "synthetic"):
        return f"rejection_sample_method={method}"
    if not hasattr(rejection, "synthetic_conditional_rates"):
        return "vLLM's rejection sampler has changed"
    if rejection.watermark_key is not None:
        return "drafts are watermarked"
    if speculator is None or speculator.draft_logits is not None:
        return "the draft's logits are asked for"
    return ""


def sampler_problem(sampler: Any) -> str:
    """Why this sampler does more than take the best token of a plain request, or ""."""
    if type(sampler).__name__ != "Sampler" or not type(sampler).__module__.startswith("vllm."):
        return f"the sampler is {type(sampler).__name__}"
    try:
        states = sampler.sampling_states
        states.temperature.np, states.top_k.np, states.top_p.np, states.num_logprobs, states.vocab_size  # noqa: B018
        sampler.needs_logits_processing, sampler.logprob_token_ids_state.num_token_ids.np  # noqa: B018
        more = sampler.compute_nans, sampler.return_sampling_mask, sampler.trace_replay_state is not None
    except AttributeError as error:
        return f"vLLM's sampler has changed: {error}"
    wanted = ("NaNs are counted", "sampling masks are returned", "a trace is replayed")
    return next((reason for reason, asked in zip(wanted, more, strict=True) if asked), "")


def install(model: Any, sampler: Any) -> None:
    """Greedy batches of `model` (a loaded `LingForCausalLM`) take the best rows; other models see no change."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    reason = sampler_problem(sampler)
    stock = GPUModelRunner.sample
    if list(inspect.signature(stock).parameters) != _SAMPLE:
        reason = "GPUModelRunner.sample has changed"
    if not inspect.signature(SamplerOutput).parameters.keys() >= _OUTPUT:
        reason = "SamplerOutput has changed"
    if reason:
        choose(_WHAT, "vLLM's", reason)
        return
    model.ling_greedy = GreedySampling(model, sampler)
    if not hasattr(stock, "ling"):
        GPUModelRunner.sample = _wrapped(stock)  # type: ignore[method-assign]
    choose(_WHAT, "best rows", "batches of plain greedy requests need no logits")


def _wrapped(stock: Any) -> Any:
    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        greedy = getattr(self.model, "ling_greedy", None)
        if greedy is not None and grammar_output is None and _alone(self):
            taken = greedy.sample(self, hidden_states, input_batch)
            if taken is not None:
                return taken
        return stock(self, hidden_states, input_batch, grammar_output)

    sample.ling = True  # type: ignore[attr-defined]
    return sample


def _alone(runner: Any) -> bool:
    """Whether nobody else takes part in sampling: other ranks, or a length of drafts that only the GPU knows."""
    return runner.batch_sharder is None and runner.pp_handler is None and runner.adaptive_verification is None
