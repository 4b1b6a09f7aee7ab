# SPDX-License-Identifier: Apache-2.0
"""vLLM's own V2 sampler on the CPU: its tables are real, its Triton kernels are out of reach."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

REQUESTS, VOCAB = 4, 512


def make_sampler(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A `Sampler` of `REQUESTS` slots. Its buffers copy, as on a platform without pinned memory."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    cpu = torch.device("cpu")
    states = RequestState(REQUESTS, 64, 64, 3, VOCAB, cpu)
    config: Any = SimpleNamespace(
        reasoning_config=None,
        model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: VOCAB),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    return Sampler(config, REQUESTS, VOCAB, cpu, states, **settings)
