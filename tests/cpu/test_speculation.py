# SPDX-License-Identifier: Apache-2.0
"""Speculation never changes greedy output: tiny-ling with and without MTP(3), token for token in FP32.

In BF16 a batch of four verified tokens may round differently from one token at a time, so there every divergence must
sit at a tie: logits closer than the rounding step of a BF16 logit of that size. Only answers are judged there: after
the end token comes text that the model never saw, where one rounded routing decision moves every logit.
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.tiny.tokenizer import EOS, token_id

PROMPTS, TOKENS = 40, 96
# BF16 keeps 8 significant bits: neighbours differ by 2^-7 of their size, and either logit may round either way.
BF16_STEP = 2.0**-6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tiny_ling_path() / "tokenizer.json"))
    lines = (tiny_ling_path().parent / "data" / "heldout.jsonl").read_text().splitlines()[:PROMPTS]
    template = "<role>HUMAN</role>{}<|role_end|><role>ASSISTANT</role>"
    asked = [tokenizer.encode(template.format(json.loads(line)["question"])).ids for line in lines]
    # A one-token prompt beside running decodes is the case that upstream's V1 scheduler gets wrong.
    return [asked[0][:1], *asked[1:]]


def without_mtp_weights(folder: Path) -> Path:
    """tiny-ling with an MTP layer of zeros: it loads, and drafts nothing useful."""
    shutil.copytree(tiny_ling_path(), folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.6."):
            tensors[name] = torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)
    save_file(tensors, shard)
    return folder


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, one_thread: dict[str, str], at_once: int
) -> Iterator[dict[str, EngineRun]]:
    specs = []
    for dtype, concurrency in (("float32", 1), ("float32", 4), ("bfloat16", 4)):
        for drafts in (0, 3):
            specs.append(
                EngineSpec(
                    f"{dtype}-{concurrency}-{drafts}",
                    str(tiny_ling_path()),
                    prompts(),
                    dtype=dtype,
                    max_tokens=TOKENS,
                    concurrency=concurrency,
                    draft_tokens=drafts,
                    top_logits=5 if dtype == "bfloat16" else 0,
                )
            )
    zeros = without_mtp_weights(tmp_path_factory.mktemp("zeros") / "model")
    specs.append(EngineSpec("mtp zeros", str(zeros), prompts()[:8], max_tokens=TOKENS, draft_tokens=3))
    with ThreadPoolExecutor(at_once) as pool:
        parts = pool.map(
            lambda first: run_engines(specs[first::at_once], timeout_s=1500, environment=one_thread),
            range(at_once),
        )
        yield {run.name: run for part in parts for run in part}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_fp32_is_identical(concurrency: int, runs: dict[str, EngineRun]) -> None:
    plain, drafted = runs[f"float32-{concurrency}-0"], runs[f"float32-{concurrency}-3"]
    assert sum(map(len, plain.tokens)) == PROMPTS * TOKENS
    different = [
        i for i, pair in enumerate(zip(plain.tokens, drafted.tokens, strict=True)) if pair[0] != pair[1]
    ]
    assert not different, f"prompts {different} differ"


@pytest.mark.parametrize("name", ["float32-1-3", "float32-4-3", "bfloat16-4-3"])
def test_drafts_are_accepted_and_the_head_is_proven(name: str, runs: dict[str, EngineRun]) -> None:
    run = runs[name]
    assert run.accept_length is not None and run.accept_length > 2.3
    assert {"draft_head", "head_probe"} <= run.status["proofs"].keys()
    assert not run.status["faults"]


def test_mtp_layer_of_zeros_drafts_nothing_and_changes_nothing(runs: dict[str, EngineRun]) -> None:
    zeros = runs["mtp zeros"]
    assert zeros.accept_length is not None and zeros.accept_length < 1.3
    assert zeros.tokens == runs["float32-4-0"].tokens[:8]


def test_bf16_differs_at_ties_only(runs: dict[str, EngineRun]) -> None:
    plain, drafted = runs["bfloat16-4-0"], runs["bfloat16-4-3"]
    eos = token_id(Tokenizer.from_file(str(tiny_ling_path() / "tokenizer.json")), EOS)
    ties = answers = 0
    for ours, theirs, tops in zip(plain.tokens, drafted.tokens, plain.tops, strict=True):
        if eos not in ours:
            continue  # the one-token prompt has no answer
        answers += 1
        first = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if first is None or first > ours.index(eos):
            continue
        ties += 1
        (_, best), *others = tops[first]  # more than two tokens can tie in BF16
        assert theirs[first] in dict(others), "the other token is not even among the five best"
        gap = best - dict(others)[theirs[first]]
        assert gap <= BF16_STEP * abs(best), f"gap {gap} at logit {best} is no tie"
    assert answers >= PROMPTS - 4
    print(f"{ties} of {answers} answers diverge, each at a tie")
