# SPDX-License-Identifier: Apache-2.0
"""Evidence damaged at random: every check answers, whatever the bytes are."""

import json
import os
import random
from pathlib import Path

import pytest

from tests.doctor.evidence import CONFIG, GPU_LOG, Live
from vllm_ling.doctor.facts.checkpoint import read_checkpoint
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.pages import ServerUnreadable
from vllm_ling.doctor.facts.server import parse_samples, put_samples
from vllm_ling.doctor.facts.settings import put_command
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.registry import all_checks, run_checks
from vllm_ling.doctor.render import as_json

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "60"))
PIECES = [
    "9" * 30,
    "-1",
    "nan",
    "1e999",
    "\0",
    "\x1b[2J",
    "{",
    "]",
    '"',
    "'",
    "=",
    " ",
    "None",
    "\u00b2",
    "\ud800",
]


def damaged(text: str, rng: random.Random) -> str:
    """Some pieces overwritten, cut out or doubled."""
    for _ in range(rng.randint(1, 6)):
        place, length = rng.randrange(max(1, len(text))), rng.choice((1, 3, 20, 200))
        cut = text[place : place + length]
        text = text[:place] + rng.choice(["", cut + cut, *PIECES]) + text[place + length :]
    return text


def all_answer(facts: Facts) -> None:
    findings, idle = run_checks(facts)
    assert len(findings) + len(idle) == len(all_checks())
    answer = json.loads(as_json(findings, facts, idle), parse_constant=lambda name: pytest.fail(name))
    assert all(finding["evidence"].isprintable() for finding in answer["findings"])


@pytest.mark.parametrize("seed", range(4))
def test_logs(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "server.log"
    for _ in range(ROUNDS):
        path.write_text(damaged(GPU_LOG, rng), errors="surrogatepass")
        facts = Facts()
        read_log(facts, path)
        all_answer(facts)


@pytest.mark.parametrize("seed", range(4))
def test_metrics(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    pages = Live().pages(tmp_path)
    for _ in range(ROUNDS):
        facts = Facts()
        facts.sources.add("live")
        facts.put("server.version", "0.33.0", "/version")
        try:
            before, after = (parse_samples(damaged(page, rng)) for page in pages)
        except ServerUnreadable:
            continue
        put_samples(facts, before, after, "test")
        all_answer(facts)


@pytest.mark.parametrize("seed", range(4))
def test_configs_and_commands(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    command = (
        "--max-num-seqs 4 --gpu-memory-utilization 0.85 -cc.cudagraph_mode FULL --cudagraph-capture-sizes 1 2 "
        '--speculative-config {"method":"mtp","num_speculative_tokens":3} --hf-overrides {"head_dtype":"float32"} '
        '--additional-config {"ling":{"moe":"humming"}} --kernel-config {"moe_backend":"humming"}'
    )
    for _ in range(ROUNDS):
        (tmp_path / "config.json").write_text(damaged(json.dumps(CONFIG), rng), errors="surrogatepass")
        facts = Facts()
        facts.put("gpu.names", ["NVIDIA GB10"], "test")
        facts.put("gpu.capability", 121, "test")
        put_command(facts, [str(tmp_path), *damaged(command, rng).split()])
        read_checkpoint(facts, str(tmp_path))
        all_answer(facts)
