# SPDX-License-Identifier: Apache-2.0
"""KDA on the CPU against a token-by-token loop in float64, through every way in which vLLM schedules a request.

A little scheduler drives `kda_batch` as the model runner would: prompts whole and in parts, decodes, verification of
drafts with any number of them accepted, one-token prompts padded to a verification, and slots that are used again.
"""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_ling.cpu.kda_batch import kda_batch
from vllm_ling.cpu.kda_math import CHUNK, MAX_DECAY, kda_chunks, kda_steps, log_decay
from vllm_ling.cpu.kda_rows import plan_rows

HEADS, DIM, WIDTH, DRAFTS = 2, 8, 4, 3
CHANNELS = 3 * HEADS * DIM
# float32 against float64 over a few hundred tokens; the outputs are of order one.
RTOL, ATOL = 2e-4, 2e-5


@dataclass
class Inputs:
    """What the layer's projections give for consecutive tokens of one request."""

    qkv: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def random(cls, tokens: int, generator: torch.Generator, strongest: float = -5.0) -> "Inputs":
        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator)

        qkv = torch.randn(tokens, CHANNELS, generator=generator)
        return cls(qkv, rand(tokens, HEADS, DIM) * strongest, rand(tokens, HEADS))

    def __getitem__(self, part: slice) -> "Inputs":
        return Inputs(self.qkv[part], self.g[part], self.beta[part])

    def __add__(self, other: "Inputs") -> "Inputs":
        return Inputs(
            *(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def loop(x: Inputs, weight: Tensor) -> Tensor:
    """The definition, one token at a time, from an empty past; [tokens, HEADS, DIM] float64."""
    padded = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), x.qkv]).double()
    state = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
    outputs = []
    for t in range(len(x.qkv)):
        mixed = F.silu((padded[t : t + WIDTH] * weight).sum(0)).view(3, HEADS, DIM)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in mixed[:2])
        state = state * x.g[t].double().exp()[:, None, :]
        error = mixed[2] - torch.einsum("hvk,hk->hv", state, k)
        state = state + x.beta[t].double()[:, None, None] * error[:, :, None] * k[:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q) * DIM**-0.5)
    return torch.stack(outputs)


@dataclass(eq=False)
class Request:
    """A request as the scheduler sees it: what it will be fed, how much of that is computed, and its slots."""

    inputs: Inputs
    prompt: int
    slots: list[int]
    done: int = 0
    accepted: int = 1


@dataclass
class Engine:
    """One layer's caches, laid out as strided views of cache pages like vLLM's, and full of garbage at first."""

    dim_first: bool = False
    conv_dtype: torch.dtype = torch.float32
    weight: Tensor = field(default_factory=lambda: torch.randn(WIDTH, CHANNELS, generator=_seeded(5)) / 2)

    def __post_init__(self) -> None:
        pages = torch.full((24, 5000), 1e3)
        window = WIDTH - 1 + DRAFTS
        conv = pages[:, : window * CHANNELS].to(self.conv_dtype)
        if self.dim_first:
            self.conv_state = conv.unflatten(1, (CHANNELS, window)).transpose(1, 2)
        else:
            self.conv_state = conv.unflatten(1, (window, CHANNELS))
        self.states = pages[:, -HEADS * DIM * DIM :].unflatten(1, (HEADS, DIM, DIM))

    def step(self, work: list[tuple[Request, int, int]], speculative: bool) -> list[Tensor]:
        """Runs (request, tokens, drafts or -1) rows; returns the output of each."""
        starts = torch.tensor([0, *(tokens for _, tokens, _ in work)]).cumsum(0).tolist()
        rows = plan_rows(
            starts=starts,
            past=[request.done for request, _, _ in work],
            slots=[request.slots for request, _, _ in work],
            accepted=[request.accepted for request, _, _ in work] if speculative else None,
            drafts=[drafts for _, _, drafts in work] if speculative else None,
            conv_width=WIDTH,
        )
        x = None
        for request, tokens, _ in work:
            part = request.inputs[slice(request.done, request.done + tokens)]
            x = part if x is None else x + part
        assert x is not None
        out = kda_batch(x.qkv, x.g, x.beta, self.weight, self.conv_state, self.states, rows)
        return list(out.split([tokens for _, tokens, _ in work]))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(engine: Engine, work: list[tuple[Request, int, int]], speculative: bool) -> None:
    """Runs one step and compares every row with the loop over all its tokens."""
    for (request, tokens, _), out in zip(work, engine.step(work, speculative), strict=True):
        expected = loop(request.inputs[slice(0, request.done + tokens)], engine.weight)[-tokens:]
        torch.testing.assert_close(out.double(), expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("accepted", range(1, DRAFTS + 2))
def test_verification_goes_on_from_the_accepted_token(accepted: int, dim_first: bool) -> None:
    engine, generator = Engine(dim_first), _seeded(accepted)
    requests = [
        Request(Inputs.random(40, generator), 9 + i, [1 + 4 * i + j for j in range(4)]) for i in range(3)
    ]
    check(engine, [(request, request.prompt, -1) for request in requests], speculative=True)
    for request in requests:
        request.done = request.prompt
    for _ in range(4):
        check(engine, [(request, DRAFTS + 1, DRAFTS) for request in requests], speculative=True)
        for request in requests:
            # Rejected drafts were computed, but the next tokens take their place.
            kept = request.inputs[slice(0, request.done + accepted)]
            request.inputs = kept + Inputs.random(DRAFTS + 1, generator)
            request.done, request.accepted = request.done + accepted, accepted


def test_a_kept_state_is_not_just_the_last_one() -> None:
    engine, generator = Engine(), _seeded(0)
    request = Request(Inputs.random(30, generator), 8, [1, 2, 3, 4], done=0)
    engine.step([(request, 8, -1)], speculative=True)
    request.done = 8
    engine.step([(request, 4, 3)], speculative=True)
    request.done, request.accepted = 9, 4  # claims more accepted tokens than the past holds
    (wrong,) = engine.step([(request, 4, 3)], speculative=True)
    expected = loop(request.inputs[slice(0, 13)], engine.weight)[-4:]
    assert not torch.allclose(wrong.double(), expected, rtol=RTOL, atol=ATOL)


def test_padded_one_token_prompt_ignores_the_recycled_slot() -> None:
    engine, generator = Engine(), _seeded(1)
    running = Request(Inputs.random(30, generator), 5, [5, 6, 7, 8])
    check(engine, [(running, 5, -1)], speculative=True)
    running.done = 5
    fresh = Request(Inputs.random(30, generator), 1, [1, 2, 3, 4], accepted=4)
    check(engine, [(running, 4, 3), (fresh, 4, 3)], speculative=True)
    for request in (running, fresh):
        request.done, request.accepted = request.done + 1, 1
    check(engine, [(running, 4, 3), (fresh, 4, 3)], speculative=True)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 100])
def test_prompt_in_chunks_equals_steps(length: int) -> None:
    engine = Engine()
    request = Request(Inputs.random(length + 1, _seeded(length)), length, [3])
    check(engine, [(request, length, -1)], speculative=False)
    request.done = length
    check(engine, [(request, 1, -1)], speculative=False)


def test_strongest_decay_stays_finite_and_exact() -> None:
    generator = _seeded(2)
    x = Inputs.random(70, generator)
    # Some channels forget everything at each token, the others nothing: the extremes of one chunk.
    x.g = torch.where(torch.rand(x.g.shape, generator=generator) < 0.5, -MAX_DECAY, 0.0)
    check(Engine(), [(Request(x, 70, [1]), 70, -1)], speculative=False)


def test_bf16_convolution_cache_rounds_inputs_only_once() -> None:
    engine = Engine(conv_dtype=torch.bfloat16)
    x = Inputs.random(40, _seeded(3))
    x.qkv = x.qkv.bfloat16().float()  # what a BF16 projection gives
    request = Request(x, 20, [1])
    check(engine, [(request, 20, -1)], speculative=False)
    request.done = 20
    for _ in range(8):
        check(engine, [(request, 1, -1)], speculative=False)
        request.done += 1


@settings(max_examples=60)
@given(data=st.data())
def test_any_schedule_equals_the_loop(data: st.DataObject) -> None:
    generator = _seeded(data.draw(st.integers(0, 2**16)))
    speculative = data.draw(st.booleans())
    engine, free = Engine(), [[1 + 4 * i + j for j in range(4)] for i in range(5)]
    running: list[Request] = []
    for _ in range(data.draw(st.integers(2, 8))):
        while free and len(running) < 4 and data.draw(st.booleans()):
            prompt = data.draw(st.sampled_from([1, 1, 2, 5, CHUNK, 23, 40]))
            running.append(Request(Inputs.random(prompt + 60, generator), prompt, free.pop(0)))
        work = [(request, *_draw_work(data, request, speculative)) for request in running]
        if not work:
            continue
        work = data.draw(st.permutations(work))
        check(engine, work, speculative)
        for request, tokens, drafts in work:
            kept = tokens
            if drafts >= 0:
                # Placeholders of a padded prompt are never accepted.
                kept = data.draw(st.integers(1, tokens)) if request.done else 1
                past = request.inputs[slice(0, request.done + kept)]
                request.inputs, request.accepted = past + Inputs.random(40, generator), kept
            request.done += kept
        for request in [r for r in running if r.done > r.prompt + 8 or data.draw(st.integers(0, 9)) == 0]:
            running.remove(request)
            free.append(request.slots)


def _draw_work(data: st.DataObject, request: Request, speculative: bool) -> tuple[int, int]:
    """Tokens and drafts (-1: no verification) of a request's next step, as vLLM's scheduler might choose them."""
    left = request.prompt - request.done
    if left > 0 and not (speculative and request.prompt == 1 and data.draw(st.booleans())):
        return data.draw(st.integers(1, left)), -1
    if left > 0:
        return DRAFTS + 1, DRAFTS
    drafts = data.draw(st.integers(0, DRAFTS)) if speculative else -1
    return max(drafts, 0) + 1, drafts


def test_steps_write_one_state_per_token_and_touch_no_other_slot() -> None:
    generator = _seeded(4)
    states = torch.randn(8, HEADS, DIM, DIM, generator=generator)
    before = states.clone()
    q, k, v = (torch.randn(3, HEADS, DIM, generator=generator) for _ in range(3))
    g, beta = -torch.rand(3, HEADS, DIM, generator=generator), torch.rand(3, HEADS, generator=generator)
    out = kda_steps(q, k, v, g, beta, states, read=[6], write=[[2, 6, 4]])
    expected = before[6]
    for t, slot in enumerate([2, 6, 4]):
        expected = expected * g[t].exp().unsqueeze(1)
        update = beta[t].unsqueeze(-1) * (v[t] - (expected @ k[t].unsqueeze(-1)).squeeze(-1))
        expected = expected + update.unsqueeze(-1) * k[t].unsqueeze(1)
        torch.testing.assert_close(states[slot], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[t], (expected @ q[t].unsqueeze(-1)).squeeze(-1), rtol=1e-5, atol=1e-5)
    untouched = [0, 1, 3, 5, 7]
    assert torch.equal(states[untouched], before[untouched])


def test_empty_chunk_places_leave_the_state_alone() -> None:
    state = torch.randn(2, DIM, DIM, generator=_seeded(6))
    zeros = torch.zeros(2, CHUNK, DIM)
    after = state.clone()
    out = kda_chunks(zeros, zeros, zeros, zeros, torch.zeros(2, CHUNK, 1), after, active=[2])
    assert torch.equal(after, state) and not out.any()


def test_gate_is_bounded_and_per_channel() -> None:
    f, bias = torch.randn(3, HEADS * DIM, generator=_seeded(7)) * 20, torch.arange(HEADS * DIM) / 10
    a_log = torch.tensor([0.0, 1.0]).view(1, 1, HEADS, 1)
    g = log_decay(f, a_log, bias, -5.0)
    for t in range(3):
        for h in range(HEADS):
            for d in range(DIM):
                x = f[t, h * DIM + d] + bias[h * DIM + d]
                expected = -5.0 / (1 + torch.exp(-torch.exp(a_log.flatten()[h]) * x))
                torch.testing.assert_close(g[t, h, d], expected, rtol=1e-5, atol=1e-6)
    assert g.min() >= -5.0 and g.max() <= 0
