# SPDX-License-Identifier: Apache-2.0
"""Our greedy sampling beside vLLM's own V2 sampler and rejection sampler, their Triton kernels interpreted on the CPU.

A process of its own: `python -m tests.cpu.greedy_in_triton [wrong]` prints what it found as JSON; with `wrong`, our
head takes the highest id of a tie. Triton decides at its import whether it interprets, and vLLM at its own whether
there is a Triton.
"""

import json
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import vllm.triton_utils as utils

utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True

from vllm import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler  # noqa: E402

from tests.cpu.v2_sampler import REQUESTS, VOCAB, make_sampler  # noqa: E402
from vllm_ling.host import greedy  # noqa: E402

MOST_DRAFTS, PROMPT, TEXT = 3, 4, 20
SETTINGS = {
    "enable_adaptive_verification": False,
    "rejection_sample_method": "standard",
    "fly_window_size": None,
}
# Of a request: greedy, greedy but not plain, and sampled (the seeds make vLLM's own draws repeatable).
PLAIN: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0, "top_p": 0.4, "seed": 3}]
OTHER: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "logit_bias": {3: 20.0}},
    {"temperature": 0, "min_tokens": 400, "stop_token_ids": [2]},
    {"temperature": 0, "allowed_token_ids": [7, 8]},
    {"temperature": 0.7, "seed": 11},
    {"temperature": 1.0, "seed": 12},
]


class Model:
    """Its hidden states are its logits."""

    wrong = False

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        largest = (hidden == hidden.max(-1, keepdim=True).values).int()
        return VOCAB - 1 - largest.flip(-1).argmax(-1) if self.wrong else largest.argmax(-1)


def make_batch(rng: random.Random, slots: list[int], drafts: list[int], logits: torch.Tensor) -> Any:
    """vLLM's `InputBatch` as its runner fills it; drafts are right, wrong or a placeholder."""
    each = [n + 1 for n in drafts]
    tokens, starts = sum(each), np.cumsum([0, *each]).astype(np.int32)
    best, ids = Model().best_tokens(logits), torch.zeros(tokens, dtype=torch.int32)
    for start, n in zip(starts, drafts, strict=False):
        for k in range(1, n + 1):
            ids[start + k] = int(best[start + k - 1]) if rng.random() < 0.7 else rng.choice([-1, 5, 9])
    index = np.array(slots, dtype=np.intp)
    local = torch.cat([torch.arange(n, dtype=torch.int32) for n in each])
    return SimpleNamespace(
        num_reqs=len(slots),
        num_tokens=tokens,
        has_prefill=False,
        num_scheduled_tokens=np.array(each, dtype=np.int32),
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=np.array(drafts, dtype=np.int32) if sum(drafts) else None,
        input_ids=torch.cat([ids, torch.zeros(2, dtype=torch.int32)]),
        positions=local.long() + TEXT,
        logits_indices=torch.arange(tokens),
        idx_mapping=torch.from_numpy(index.astype(np.int64)),
        idx_mapping_np=index,
        expanded_idx_mapping=torch.from_numpy(np.repeat(index, each).astype(np.int64)),
        expanded_local_pos=local,
        cu_num_logits=torch.from_numpy(starts),
        cu_num_logits_np=starts,
        seq_lens=torch.tensor(each, dtype=torch.int32) + TEXT,
        seq_lens_cpu_upper_bound=torch.tensor(each, dtype=torch.int32) + TEXT,
    )


def tokens_of(found: Any) -> list[Any]:
    """All that the runner reads of what a sampler returns."""
    output, number, rejected = found
    ids = [row[:n] for row, n in zip(output.sampled_token_ids.tolist(), number.tolist(), strict=True)]
    types = [str(t.dtype) for t in (output.sampled_token_ids, number, rejected)]
    assert output.num_sampled is number and output.num_rejected is rejected
    return [ids, number.tolist(), rejected.tolist(), types, output.logprobs_tensors is None, output.num_nans]


def compare(seed: int, cases: int) -> dict[str, Any]:
    """Cases that took our way, that had to take vLLM's, and that differ."""
    rng, patch = random.Random(seed), pytest.MonkeyPatch()
    torch.manual_seed(seed)
    sampler, model = make_sampler(patch), Model()
    stock = GPUModelRunner.sample
    greedy.install(model, sampler)
    spec: Any = SimpleNamespace(
        num_speculative_tokens=MOST_DRAFTS, fly_entropy_threshold=0.3, fly_entropy_top_k=3, **SETTINGS
    )
    runner: Any = SimpleNamespace(
        model=model,
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler, spec, torch.device("cpu")),
        speculator=SimpleNamespace(draft_logits=None),
        speculative_config=spec,
        batch_sharder=None,
        pp_handler=None,
        adaptive_verification=None,
    )
    ours: Any = GPUModelRunner.sample
    assert ours is not stock
    sampler.req_states.prefill_len.np[:] = PROMPT
    sampler.req_states.prefill_len.copy_to_uva()
    result: dict[str, Any] = {"ours": 0, "vllm": 0, "accepted": 0, "different": [], "wrongly": []}
    for case in range(cases):
        slots = rng.sample(range(REQUESTS), rng.randint(1, 3))
        params = [rng.choice(PLAIN if rng.random() < 0.85 else OTHER) for _ in slots]
        for slot, settings in zip(slots, params, strict=True):
            sampler.add_request(slot, SamplingParams(max_tokens=500, **settings))
        sampler.apply_staged_writes()
        uniform = rng.choice([0, 0, 1, 2, 3])
        ragged = rng.random() < 0.15
        drafts = [rng.randint(0, 3) if ragged else uniform for _ in slots]
        tokens = sum(drafts) + len(slots)
        # Few different values: most rows have ties for the largest.
        hidden = torch.randint(-6, 7, (tokens + 2, VOCAB)).bfloat16() / (1 if rng.random() < 0.5 else 64)
        batch = make_batch(rng, slots, drafts, hidden[:tokens])
        asked: list[Any] = []
        model.compute_logits = lambda x, asked=asked: asked.append(1) or x  # type: ignore[func-returns-value,method-assign,misc]
        mine = tokens_of(ours(runner, hidden.clone(), batch, None))
        took = not asked
        theirs = tokens_of(stock(runner, hidden.clone(), batch, None))
        plain = all(settings in PLAIN for settings in params) and len(set(drafts)) == 1
        result["ours" if took else "vllm"] += 1
        result["accepted"] += sum(n - 1 for n in mine[1])
        if took != plain:
            result["wrongly"].append([case, params, drafts])
        if mine != theirs:
            result["different"].append([case, params, drafts, mine, theirs])
    return result


if __name__ == "__main__":
    Model.wrong = sys.argv[1:] == ["wrong"]
    print(json.dumps(compare(0, 20 if Model.wrong else 120)))
