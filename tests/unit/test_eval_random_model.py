# SPDX-License-Identifier: Apache-2.0
"""`eval ablate --random-weights`: the model folder without weights, and what the command makes of its options."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.cli import app
from vllm_ling.errors import LingError
from vllm_ling.eval.ablation import command
from vllm_ling.eval.ablation.command import Asked, make_plan
from vllm_ling.eval.ablation.random_model import RandomModel
from vllm_ling.eval.provenance import ROOT
from vllm_ling.eval.runs.gsm8k import Gsm8k
from vllm_ling.eval.runs.synthetic import Synthetic
from vllm_ling.tiny.assets import MODEL_DIR

FLASH, MINI = RandomModel("flash", 42), RandomModel("mini", 6)


def test_the_folder_is_flash_of_full_size_and_written_the_same_again(tmp_path: Path) -> None:
    folder = FLASH.write(tmp_path / "model")
    shape = LingShape.from_folder(folder)
    assert (shape.vocab_size, shape.num_hidden_layers, shape.num_experts, shape.fmt) == (
        157184,
        42,
        512,
        "fp4",
    )
    assert shape.num_nextn_predict_layers == 1
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert not [name for name in first if name.endswith("safetensors")]
    FLASH.write(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


@pytest.mark.parametrize("model", [FLASH, MINI])
def test_every_id_is_a_word_and_text_is_encoded_as_tiny_ling_does(model: RandomModel, tmp_path: Path) -> None:
    folder = model.write(tmp_path / "model")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    wide, tiny = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (folder, MODEL_DIR))
    assert wide.get_vocab_size() == size and all(wide.id_to_token(number) for number in range(size))
    text = "A plugin that makes stock vLLM serve Ling-3.0: 12 x 34 = 408, \u00fcber."
    ids = wide.encode(text).ids
    assert ids == tiny.encode(text).ids and wide.decode(ids) == text
    words = wide.decode([size - 1, size - 2]).split()
    assert len(words) == 2 and words[0] != words[1] and all(word.startswith("zz") for word in words)


def test_vllm_without_the_plugin_reads_the_config(tmp_path: Path) -> None:
    """In a process of its own, as the plugin of this one may have made the type known already."""
    folder = MINI.write(tmp_path / "model")
    code = "import sys; from vllm.transformers_utils.config import get_config as get\n"
    code += "for trust in (False, True):\n    try:\n"
    code += "        print(type(get(sys.argv[1], trust_remote_code=trust)).__name__)\n"
    code += "    except Exception as error:\n        print('refused', str(error).replace(chr(10), ' '))"
    env = os.environ | {"VLLM_LING_DISABLE": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")}
    words = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    refused, read = done.stdout.splitlines()[-2:]
    assert refused.startswith("refused ") and "trust_remote_code" in refused, (
        "else the stock stage needs no flag"
    )
    assert read == "BailingMoeV3TextConfig"


def asked(out: Path, **changes: Any) -> Asked:
    loads = [Synthetic(None, isl=64, osl=32, requests=1, repeats=3)]
    return replace(
        Asked("stock,moe,mtp", [], [], None, loads, 1, 0.01, out, restart=False, random=FLASH), **changes
    )


def test_stages_of_random_weights(tmp_path: Path) -> None:
    what = make_plan(asked(tmp_path, serve=["--enforce-eager"]), gpu=True)
    stock, moe, mtp = what.stages
    assert stock.flags == ("--trust-remote-code",) and moe.flags == ()
    assert what.serve[0] == str(tmp_path / "model") and what.serve[-1] == "--enforce-eager"
    assert what.serve[what.serve.index("--served-model-name") + 1] == "flash-random-weights"
    assert what.serve[what.serve.index("--load-format") + 1] == "dummy"
    assert what.serve[what.serve.index("--max-model-len") + 1] == "97"
    assert (moe.options["lm_head"], mtp.accept_length) == ("bf16", 2.68)
    cut = make_plan(asked(tmp_path, random=RandomModel("flash", 6), flags=["stock=--x 1"]), gpu=True)
    assert "flash-6-layers-random-weights" in cut.serve
    assert cut.stages[0].flags == ("--trust-remote-code", "--x", "1")


def test_no_lots_are_drawn_on_a_cpu(tmp_path: Path) -> None:
    assert make_plan(asked(tmp_path, accept_length=2.0), gpu=False).stages[-1].accept_length is None
    assert make_plan(asked(tmp_path, accept_length=2.0), gpu=True).stages[-1].accept_length == 2.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"questions": Gsm8k()}, "random weights answer no questions"),
        ({"serve": ["tiny-ling"]}, "leave tiny-ling out"),
        ({"random": None}, "give MODEL"),
        ({"random": None, "serve": ["m"], "accept_length": 2.0}, "only --random-weights has drafts"),
        ({"accept_length": 5.0}, "between 1 and 4"),
        ({"loads": []}, "measures nothing"),
        ({"margin": 0.0}, "--margin 0"),
        ({"flags": ["moe"]}, "expected NAME=SERVE FLAGS"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LingError, match=said):
        make_plan(asked(tmp_path, **changes), gpu=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs --text FILE, --random-tokens, or both"),
        (["--random-tokens", "--layers", "6"], "only --random-weights can be cut"),
    ],
)
def test_command_line_errors(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["eval", "ablate", *words, "--", "tiny-ling"])
    assert isinstance(done.exception, LingError) and said in str(done.exception)


def test_command_line_arguments_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Asked] = []
    monkeypatch.setattr(command, "ablate", lambda what: seen.append(what) or 0)
    text = tmp_path / "book.txt"
    words = [
        "--random-weights",
        "mini",
        "--text",
        str(text),
        "--random-tokens",
        "--isl",
        "64",
        "--keep-going",
    ]
    done = CliRunner().invoke(app, ["eval", "ablate", *words, "--", "--enforce-eager"])
    assert done.exit_code == 0, done.output
    (what,) = seen
    assert [load.label for load in what.loads] == ["text 64/256", "random tokens 64/256"]
    assert (what.random, what.questions, what.keep_going) == (MINI, None, True)
    assert what.serve == ["--enforce-eager"]
    done = CliRunner().invoke(app, ["eval", "ablate", "--random-tokens", "--", "tiny-ling"])
    assert done.exit_code == 0 and seen[1].random is None and seen[1].questions is not None
