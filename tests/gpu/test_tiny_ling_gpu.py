# SPDX-License-Identifier: Apache-2.0
"""tiny-ling on a GPU with every kernel of ours: greedy answers, with and without drafts, are the CPU's.

Our MoE and fused kernels refuse its 16 experts and 2 heads, so it is served widened by zeros: the same function
(`tests/unit/test_widened.py`) in shapes that every kernel takes.

The oracle is tiny-ling's fp32 reference, whose answers the CPU backend repeats token for token. It puts the second best
token 6 logits or more below the best everywhere, so `NEAR_TIE` excuses little: FP8 activations move a logit of 19, the
median best one, by about 0.5.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.widened import widen
from vllm_ling.eval.studies.answers import TinyAnswers
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.eval.studies.seeded_engine import our_options
from vllm_ling.tiny.evaluate import MAX_NEW_TOKENS

ITEMS, NEAR_TIE = 64, 1.0
# Sequences at a time for each draft length, so that a verification has at most 8 tokens, as our kernels take.
CONCURRENCY = {0: 8, 1: 4, 2: 2, 3: 2, 4: 1}
# Two roundings of 2.6% (activations, head) and the BF16 of six layers; a wrong scale or state is far above.
LOGIT_BAR = 0.06

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


# Draft lengths that also run as a user's greedy requests do: nobody asks for logits, so none are written.
TOKENS_ALONE = (0, 3)
OURS = {
    "target decode": "fused",
    "moe decode": "ling",
    "mla attention": "ling",
    "lm_head decode kernel": "ling",
    "lm_head argmax kernel": "ling",
}


def spec(model: Path, answers: TinyAnswers, drafts: int, top_logits: int = 3) -> EngineSpec:
    """An engine on `model`, tiny-ling in one shape or another."""
    concurrency = CONCURRENCY[drafts]
    sizes = [count * (1 + drafts) for count in (1, 2, 4, 8) if count <= concurrency]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return EngineSpec(
        f"k = {drafts}" + " and logits" * bool(top_logits),
        str(model),
        answers.prompts,
        dtype="bfloat16",
        max_tokens=MAX_NEW_TOKENS,
        concurrency=concurrency,
        top_logits=top_logits,
        draft_tokens=drafts,
        options=our_options(),
        sampling={"stop_token_ids": answers.stop},
        engine={"enforce_eager": False, "compilation_config": graphs},
    )


@pytest.fixture(scope="module")
def answers() -> TinyAnswers:
    return TinyAnswers(ITEMS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widen(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="module")
def runs(wide: Path, answers: TinyAnswers) -> Iterator[dict[int, EngineRun]]:
    found = run_engines([spec(wide, answers, drafts) for drafts in CONCURRENCY], timeout_s=800)
    for name, choice in sorted(found[0].status["choices"].items()):
        print(f"{name}: {choice['choice']} ({choice['reason']})")
    yield dict(zip(CONCURRENCY, found, strict=True))


@pytest.fixture(scope="module")
def alone(wide: Path, answers: TinyAnswers) -> dict[int, EngineRun]:
    found = run_engines([spec(wide, answers, drafts, top_logits=0) for drafts in TOKENS_ALONE], timeout_s=400)
    return dict(zip(TOKENS_ALONE, found, strict=True))


@pytest.mark.parametrize("drafts", TOKENS_ALONE)
def test_greedy_requests_that_ask_for_no_logits_get_the_same_answers(
    drafts: int, alone: dict[int, EngineRun], runs: dict[int, EngineRun], answers: TinyAnswers
) -> None:
    run, choices = alone[drafts], alone[drafts].status["choices"]
    for name, choice in sorted(choices.items()):
        print(f"{name}: {choice['choice']} ({choice['reason']})")
    different = {n for n in range(ITEMS) if run.tokens[n] != runs[drafts].tokens[n]}
    excused = {one.prompt for one in answers.divergences(run.tokens) if one.gap <= NEAR_TIE}
    excused |= {one.prompt for one in answers.divergences(runs[drafts].tokens) if one.gap <= NEAR_TIE}
    assert different <= excused
    assert choices["sampler tables"]["choice"] == "new requests"
    assert choices["greedy sampling"]["choice"] == "best rows"
    assert any(n.startswith("attention plans") and c["choice"] == "new batches" for n, c in choices.items())
    if drafts:
        assert choices["greedy verification"]["choice"] == "best rows"
        assert run.accept_length is not None and run.accept_length >= answers.accept_length(drafts) - 0.05


@pytest.mark.parametrize("drafts", CONCURRENCY)
def test_answers_are_the_cpus_up_to_near_ties(
    drafts: int, runs: dict[int, EngineRun], answers: TinyAnswers
) -> None:
    apart = answers.divergences(runs[drafts].tokens)
    print(f"k = {drafts}: {len(apart)} of {ITEMS} answers leave the reference's at a near tie")
    assert [one for one in apart if not one.gap <= NEAR_TIE] == []


@pytest.mark.parametrize("drafts", [drafts for drafts in CONCURRENCY if drafts])
def test_drafts_change_no_answer_but_at_near_ties(
    drafts: int, runs: dict[int, EngineRun], answers: TinyAnswers
) -> None:
    different = {n for n in range(ITEMS) if runs[drafts].tokens[n] != runs[0].tokens[n]}
    excused = {one.prompt for run in (runs[0], runs[drafts]) for one in answers.divergences(run.tokens)}
    print(f"k = {drafts}: {len(different)} of {ITEMS} answers differ from those without drafts")
    assert different <= excused and len(different) <= ITEMS // 20


@pytest.mark.parametrize("drafts", CONCURRENCY)
def test_accuracy_and_accept_length_are_the_cpus(
    drafts: int, runs: dict[int, EngineRun], answers: TinyAnswers
) -> None:
    run = runs[drafts]
    assert answers.exact_match(run.tokens) >= answers.exact_match(answers.tokens) - 1 / ITEMS
    assert not run.status["faults"]
    if drafts:
        # The engine counts drafts past the end token too, so it may be above.
        assert run.accept_length is not None and run.accept_length >= answers.accept_length(drafts) - 0.05


@pytest.mark.parametrize("drafts", CONCURRENCY)
def test_every_kernel_of_ours_serves(drafts: int, runs: dict[int, EngineRun]) -> None:
    choices = {name: choice["choice"] for name, choice in runs[drafts].status["choices"].items()}
    wanted = OURS | ({"draft decode": "fused"} if drafts else {})
    assert {name: choices.get(name) for name in wanted} == wanted
    linear = {name: choice for name, choice in choices.items() if name.startswith("linear ")}
    assert linear and set(linear.values()) == {"ling"}


@pytest.mark.parametrize("drafts", CONCURRENCY)
def test_every_kernel_was_compared_at_load(drafts: int, runs: dict[int, EngineRun]) -> None:
    proofs = runs[drafts].status["proofs"]
    print(f"k = {drafts}: {proofs}")
    wanted = {"linear_decode", "lm_head_decode", "lm_head_argmax", "moe_decode", "target_decode"}
    assert wanted | ({"draft_decode"} if drafts else set()) <= proofs.keys()
    assert ("several of a sequence" in proofs["target_decode"]) == bool(drafts)


@pytest.mark.parametrize("drafts", CONCURRENCY)
def test_logits_of_decoded_and_verified_tokens_are_near_the_reference(
    drafts: int, runs: dict[int, EngineRun], answers: TinyAnswers
) -> None:
    away = answers.distance(runs[drafts].tops, runs[drafts].tokens)
    print(f"k = {drafts}: relative RMS distance of the best logits from fp32: {away:.4f}")
    assert away <= LOGIT_BAR
