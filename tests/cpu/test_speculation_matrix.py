# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no answer: every draft length, eight requests at a time, long and short prompts, sampling too.

Greedy outputs are compared token for token in FP32. Sampled outputs follow the target's distribution: the chi-square
test of two sets of samples, with and without drafts, and a control that must be told apart.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cpu.test_speculation import prompts
from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]
DRAFTS = (1, 2, 4, 5, 7)
TOKENS = 40
SAMPLES, SAMPLED_TOKENS = 600, 3


def greedy_prompts() -> list[list[int]]:
    """A one-token prompt, usual ones, and one of a thousand tokens that is read in chunks."""
    asked = prompts()
    chooser = random.Random(0)
    long = [token for _ in range(40) for token in chooser.choice(asked[1:])][:1000]
    return [asked[0], long, *asked[1:15]]


def greedy(drafts: int) -> EngineSpec:
    return EngineSpec(
        f"greedy {drafts}",
        str(tiny_ling_path()),
        greedy_prompts(),
        max_tokens=TOKENS,
        concurrency=8,
        draft_tokens=drafts,
        engine={"max_model_len": 1280, "max_num_batched_tokens": 256},
    )


def sampled(drafts: int, **sampling: float) -> EngineSpec:
    """A prompt of random tokens, of whose answer the model is unsure, asked SAMPLES times with a seed each."""
    name = f"sampled {drafts} {sampling['temperature']}"
    return EngineSpec(
        name,
        str(tiny_ling_path()),
        [random.Random(2).choices(range(100, 600), k=20)] * SAMPLES,
        max_tokens=SAMPLED_TOKENS,
        concurrency=32,
        draft_tokens=drafts,
        sampling={"top_p": 0.98, "top_k": 60, "presence_penalty": 0.3, **sampling},
    )


@pytest.fixture(scope="module")
def runs(one_thread: dict[str, str], at_once: int) -> Iterator[dict[str, EngineRun]]:
    asked = [greedy(drafts) for drafts in (0, *DRAFTS)]
    asked += [sampled(drafts, temperature=2.0) for drafts in (0, 3)] + [sampled(0, temperature=1.0)]
    with ThreadPoolExecutor(at_once) as pool:
        parts = pool.map(
            lambda first: run_engines(asked[first::at_once], timeout_s=1500, environment=one_thread),
            range(at_once),
        )
        yield {run.name: run for part in parts for run in part}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_no_draft_length_changes_a_greedy_answer(drafts: int, runs: dict[str, EngineRun]) -> None:
    plain, drafted = runs["greedy 0"], runs[f"greedy {drafts}"]
    assert drafted.drafts > 0 and drafted.accept_length is not None and drafted.accept_length > 1.5
    different = [
        i for i, pair in enumerate(zip(plain.tokens, drafted.tokens, strict=True)) if pair[0] != pair[1]
    ]
    assert not different, f"prompts {different} differ with k = {drafts}"


def test_longer_drafts_are_accepted_further(runs: dict[str, EngineRun]) -> None:
    lengths = [runs[f"greedy {drafts}"].accept_length or 0 for drafts in DRAFTS]
    assert lengths == sorted(lengths)


def difference(one: list[list[int]], other: list[list[int]], position: int) -> float:
    """p-value of the chi-square test that both sets draw token `position` from one distribution; rare ones pooled."""
    first, second = (Counter(tokens[position] for tokens in run) for run in (one, other))
    cells: list[tuple[int, int]] = []
    rare = [0, 0]
    for token in first | second:
        a, b = first[token], second[token]
        if a + b >= 10:
            cells.append((a, b))
        else:
            rare = [rare[0] + a, rare[1] + b]
    if sum(rare) >= 10:
        cells.append((rare[0], rare[1]))
    assert len(cells) >= 5, "hardly anything was sampled"
    # Both sets have the same size, so each is expected to have half of every cell.
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    return chi_square_tail(statistic, len(cells) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square >= statistic), by Wilson and Hilferty's normal approximation (good to 0.01 for freedom >= 3)."""
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("position", range(SAMPLED_TOKENS))
def test_sampling_with_drafts_keeps_the_distribution(position: int, runs: dict[str, EngineRun]) -> None:
    """Seeds are fixed, so this outcome is: p of a right sampler is uniform, of a wrong one practically 0."""
    plain, drafted = runs["sampled 0 2.0"], runs["sampled 3 2.0"]
    assert 0 < drafted.accepted < 3 * drafted.drafts, "drafts must be accepted and rejected"
    p = difference(plain.tokens, drafted.tokens, position)
    assert p > 1e-3, f"p = {p:.2g}"


def test_the_chi_square_test_tells_a_slightly_colder_model_apart(runs: dict[str, EngineRun]) -> None:
    warm, cold = runs["sampled 0 2.0"].tokens, runs["sampled 0 1.0"].tokens
    worst = min(difference(warm, cold, n) for n in range(SAMPLED_TOKENS))
    assert worst < 1e-5


def test_chi_square_tail_at_table_values() -> None:
    for freedom, statistic, p in (
        (3, 7.815, 0.05),
        (10, 18.307, 0.05),
        (20, 37.566, 0.01),
        (50, 49.335, 0.5),
    ):
        assert chi_square_tail(statistic, freedom) == pytest.approx(p, abs=0.005)
