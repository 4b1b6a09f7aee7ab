# SPDX-License-Identifier: Apache-2.0
"""A draft of fewer tokens never changes greedy output, and with a good list drafts as well as the full head."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.spec_decode.count_tokens import run
from vllm_ling.spec_decode.draft_vocab import DraftVocab, tokenizer_hash
from vllm_ling.tiny.evaluate import load_heldout
from vllm_ling.tiny.problems import problems
from vllm_ling.tiny.tokenizer import render_chat

# The share of tiny-ling's vocabulary that 32,768 rows are of Ling-3.0-flash's.
PROMPTS, TOKENS, GOOD_ROWS = 16, 64, 213

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tiny_ling_path() / "tokenizer.json"))
    return [tokenizer.encode(render_chat(item["question"])).ids for item in load_heldout(PROMPTS)]


def good_list(folder: Path) -> Path:
    """Counted in problems of the training side, by the command."""
    text, out = folder / "problems.txt", folder / "good.json"
    shown = (render_chat(p.question, p.answer) for p in islice(problems(5, heldout=False), 2000))
    text.write_text("\n".join(shown))
    run("tiny-ling", [text], GOOD_ROWS, out)
    return out


def evil_list(folder: Path) -> Path:
    """The last eight ids: tokens that no text has."""
    known = tokenizer_hash(tiny_ling_path())
    assert known is not None
    DraftVocab(1024, known, list(range(1016, 1024)), {}).save(folder / "evil.json")
    return folder / "evil.json"


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, one_thread: dict[str, str], at_once: int
) -> Iterator[dict[str, EngineRun]]:
    folder = tmp_path_factory.mktemp("lists")
    lists = {"good": {"draft_vocab": str(good_list(folder))}, "evil": {"draft_vocab": str(evil_list(folder))}}
    lists["good bf16"] = lists["good"] | {"lm_head": "bf16"}
    local = {
        "speculative_config": {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "use_local_argmax_reduction": True,
        }
    }
    specs = []
    for concurrency in (1, 4):
        for name, drafts, options, engine in (
            ("plain", 0, {}, {}),
            ("full", 3, {}, {}),
            ("good", 3, lists["good"], {}),
            ("evil", 3, lists["evil"], {}),
            ("good, top tokens", 3, lists["good"], local),
            ("full, top tokens", 3, {}, local),
            ("plain bf16 head", 0, {"lm_head": "bf16"}, {}),
            ("good bf16 head", 3, lists["good bf16"], {}),
        ):
            if concurrency == 1 and ("top" in name or "bf16" in name):
                continue
            specs.append(
                EngineSpec(
                    f"{name} {concurrency}",
                    str(tiny_ling_path()),
                    prompts(),
                    max_tokens=TOKENS,
                    concurrency=concurrency,
                    draft_tokens=drafts,
                    options=options,
                    engine=engine,
                )
            )
    with ThreadPoolExecutor(at_once) as pool:
        parts = pool.map(
            lambda first: run_engines(specs[first::at_once], timeout_s=1500, environment=one_thread),
            range(at_once),
        )
        yield {run.name: run for part in parts for run in part}


@pytest.mark.parametrize(
    ("name", "against"),
    [
        ("full 1", "plain 1"),
        ("good 1", "plain 1"),
        ("evil 1", "plain 1"),
        ("full 4", "plain 4"),
        ("good 4", "plain 4"),
        ("evil 4", "plain 4"),
        ("good, top tokens 4", "plain 4"),
        ("full, top tokens 4", "plain 4"),
        ("good bf16 head 4", "plain bf16 head 4"),
    ],
)
def test_output_is_identical(name: str, against: str, runs: dict[str, EngineRun]) -> None:
    assert sum(map(len, runs[against].tokens)) == PROMPTS * TOKENS
    assert runs[name].tokens == runs[against].tokens


@pytest.mark.parametrize("name", ["good 1", "good 4", "good, top tokens 4"])
def test_a_good_list_drafts_as_well_as_the_full_head(name: str, runs: dict[str, EngineRun]) -> None:
    full, good = runs[f"full {name[-1]}"].accept_length, runs[name].accept_length
    print(f"{name}: accept length {good}, full head {full}")
    assert full is not None and good is not None and good >= 0.95 * full > 2.3


def test_a_useless_list_is_never_accepted(runs: dict[str, EngineRun]) -> None:
    for name in ("evil 1", "evil 4"):
        assert runs[name].accept_length == 1.0


def test_rows_come_from_the_proven_head_and_are_on_record(runs: dict[str, EngineRun]) -> None:
    for name, rows in (("good 4", GOOD_ROWS), ("evil 4", 8), ("good bf16 head 4", GOOD_ROWS)):
        status = runs[name].status
        assert "target's module object" in status["proofs"]["draft_head"] and not status["faults"]
        choice = status["choices"]["draft_vocab"]
        assert choice["choice"] == f"{rows} of 1024 rows" and ".json: gathered" in choice["reason"]
    assert "draft_vocab" not in runs["full 4"].status["choices"]
    # 256 e4m3 values and an FP32 scale a row; the plain head is served in FP32 here.
    reasons = {
        name: runs[name].status["choices"]["draft_vocab"]["reason"] for name in ("good 4", "good bf16 head 4")
    }
    assert f"{GOOD_ROWS * 260 / 1e6:.1f} MB more memory" in reasons["good 4"]
    assert f"{GOOD_ROWS * 1024 / 1e6:.1f} MB more memory" in reasons["good bf16 head 4"]


def test_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    good = good_list(tmp_path)
    other = tmp_path / "other.json"
    DraftVocab(2048, "sha256:0", list(range(64)), {}).save(other)
    specs = [
        EngineSpec(
            "other model", str(tiny_ling_path()), [[5]], draft_tokens=3, options={"draft_vocab": str(other)}
        ),
        EngineSpec("no speculation", str(tiny_ling_path()), [[5]], options={"draft_vocab": str(good)}),
        EngineSpec(
            "two ranks",
            str(tiny_ling_path()),
            [[5]],
            draft_tokens=3,
            options={"draft_vocab": str(good)},
            engine={"tensor_parallel_size": 2},
        ),
    ]
    errors = [run.error for run in run_engines(specs, keep_going=True)]
    assert "other.json: made for a vocabulary of 2048" in errors[0]
    assert "ling.draft_vocab: nothing drafts with it" in errors[1]
    assert "ling.draft_vocab: with tensor parallel 2" in errors[2]
    assert not any("load_weights" in error for error in errors)
