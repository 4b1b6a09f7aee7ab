# SPDX-License-Identifier: Apache-2.0
"""The draft gate in an engine: no answer changes, hard text is verified less, and what is counted is what was verified.

The gate judges by the bytes of Ling-3.0-flash here (`gate_on_cpu`).
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cpu.gate_on_cpu import Answer, Case
from tests.cpu.test_speculation import prompts
from tests.cpu.test_speculation_matrix import difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]
DRAFTS = (1, 3, 7)  # 2 and 5 say the same and cost half a minute
HOT = 2.0
SAMPLES = 600


def asked() -> list[list[int]]:
    """A one-token prompt, problems, and random tokens, after which the draft is unsure."""
    chooser = random.Random(1)
    return [*prompts()[:8], *(chooser.choices(range(20, 900), k=24) for _ in range(8))]


def cases() -> list[Case]:
    found = [Case("plain", asked(), 0), Case("plain 4", asked(), 0, concurrency=4)]
    found.append(Case("off 3", asked(), 3))
    found += [Case(f"gated {k}", asked(), k, "bytes", 1 if k == 3 else 4) for k in DRAFTS]
    found.append(Case("gated 3 at 4", asked(), 3, "bytes", 4))
    found += [Case(f"any length, {n} at a time", asked(), 3, "bytes", n, lengths_by_lot=True) for n in (1, 4)]
    found.append(Case("timed", asked(), 3, "times", 4))
    found.append(Case("aborted", asked(), 3, "bytes", 4, abort=True))
    # Not enough cache for four answers: requests are thrown out and start again.
    small = {"num_gpu_blocks_override": 18}
    found.append(Case("preempted", asked()[8:], 3, "bytes", 4, tokens=120, engine=small))
    found.append(Case("roomy", asked()[8:], 0, concurrency=4, tokens=120))
    hot = [asked()[8]] * 4
    for gate in ("off", "bytes"):
        found.append(Case(f"hot {gate}", hot * 2, 3, gate, 4, tokens=300, sampling={"temperature": HOT}))
    # One prompt whose answer the model is unsure of, asked with a seed each.
    same = [random.Random(2).choices(range(100, 600), k=20)] * SAMPLES
    kind = {"temperature": HOT, "top_p": 0.98, "top_k": 60}
    for name, drafts, gate, lots in (
        ("off", 0, "off", False),
        ("gated", 3, "bytes", False),
    ):
        found.append(Case(f"sampled {name}", same, drafts, gate, 32, 3, kind, lengths_by_lot=lots))
    return found


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, one_thread: dict[str, str], at_once: int
) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("gate")

    def run(number: int) -> list[Answer]:
        (questions, results) = (folder / f"asked-{number}.json", folder / f"answered-{number}.json")
        questions.write_text(json.dumps([dataclasses.asdict(case) for case in cases()[number::at_once]]))
        script = Path(__file__).with_name("gate_on_cpu.py")
        done = subprocess.run(
            [sys.executable, str(script), str(questions), str(results)],
            env={**os.environ, **one_thread, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return [
            Answer(**{**answer, "lengths": {int(k): v for k, v in answer["lengths"].items()}})
            for answer in json.loads(results.read_text())
        ]

    with ThreadPoolExecutor(at_once) as pool:
        return {answer.name: answer for part in pool.map(run, range(at_once)) for answer in part}


ANY = ["any length, 1 at a time", "any length, 4 at a time"]
GATED = [*(f"gated {k}" for k in DRAFTS), "gated 3 at 4", *ANY, "timed", "aborted"]


@pytest.mark.parametrize("name", ["off 3", *GATED])
def test_no_answer_changes(name: str, answers: dict[str, Answer]) -> None:
    plain = answers["plain"].tokens
    assert answers["plain 4"].tokens == plain
    different = [
        n for n, pair in enumerate(zip(plain, answers[name].tokens, strict=True)) if pair[0] != pair[1]
    ]
    assert not different, f"prompts {different} differ"


def test_no_answer_changes_when_requests_are_thrown_out_and_start_again(answers: dict[str, Answer]) -> None:
    assert answers["preempted"].preempted > 0
    assert answers["preempted"].tokens == answers["roomy"].tokens


@pytest.mark.parametrize("k", DRAFTS)
def test_never_longer_than_the_user_allows(k: int, answers: dict[str, Answer]) -> None:
    lengths = answers[f"gated {k}"].lengths
    assert set(lengths) <= set(range(1, k + 1))
    assert k == 1 or len(lengths) > 1, "the gate never shortened a draft"


@pytest.mark.parametrize("name", ANY)
def test_every_length_occurred_where_lots_were_drawn(name: str, answers: dict[str, Answer]) -> None:
    answer = answers[name]
    assert set(answer.lengths) == {1, 2, 3} and answer.plain > 50, (
        "steps after the first without a draft token"
    )


def test_hard_text_is_verified_less(answers: dict[str, Answer]) -> None:
    off, gated = answers["hot off"], answers["hot bytes"]
    assert off.counted / off.rounds > 2.9
    assert gated.counted / gated.rounds < 0.6 * off.counted / off.rounds
    # What is left out would mostly have been rejected.
    assert gated.accepted / gated.counted > 1.3 * off.accepted / off.counted


@pytest.mark.parametrize("name", ["sampled gated"])
@pytest.mark.parametrize("position", range(3))
def test_sampling_keeps_the_distribution(name: str, position: int, answers: dict[str, Answer]) -> None:
    """Seeds are fixed, so this outcome is; `test_speculation_matrix` shows what the test can tell apart."""
    assert 0 < answers[name].accepted < answers[name].counted
    assert difference(answers["sampled off"].tokens, answers[name].tokens, position) > 1e-3


def test_requests_of_a_step_have_lengths_of_their_own(answers: dict[str, Answer]) -> None:
    assert answers["off 3"].together == 0 and answers["gated 3 at 4"].together > 10


@pytest.mark.parametrize("name", [*GATED, "hot bytes"])
def test_what_is_counted_is_what_was_verified(name: str, answers: dict[str, Answer]) -> None:
    answer = answers[name]
    verified = sum(length * count for length, count in answer.lengths.items())
    # Verifications of requests that end or are aborted in that step are scheduled and not counted.
    assert 0 <= verified - answer.counted <= 0.02 * verified + 12
    assert answer.accepted < answer.counted


def test_the_guard_stays_quiet(answers: dict[str, Answer]) -> None:
    assert {name: answer.alarms for name, answer in answers.items() if answer.alarms} == {}


def test_the_choice_is_on_record(answers: dict[str, Answer]) -> None:
    choice, reason = answers["gated 3"].choice
    assert choice == "bytes" and "0 to 3 draft tokens" in reason and "no asynchronous scheduling" in reason
    assert answers["timed"].choice[0] == "times" and answers["off 3"].choice == []
