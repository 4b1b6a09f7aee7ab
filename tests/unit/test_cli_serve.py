# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ling serve` checks before the server starts, and what it must leave alone."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.errors import LingError
from vllm_ling.serve import _plain_look, _user_error, preflight

LING: dict[str, Any] = {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"}
QUANTIZED = LING | {"quantization_config": {"quant_method": "fp8"}}


@pytest.fixture(autouse=True)
def plugin_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The off switches of the developer's shell do not count."""
    monkeypatch.delenv("VLLM_LING_DISABLE", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders whose tensors were checked; the check itself has its own tests."""
    folders: list[Path] = []
    monkeypatch.setattr("vllm_ling.checkpoint.validate.validate_checkpoint", folders.append)
    return folders


def parsed(typed: str, **changes: Any) -> Namespace:
    """What vLLM's parser makes of a command line, as far as the check reads it."""
    defaults = {
        "model_tag": typed,
        "model": "Qwen/Qwen3-0.6B",
        "additional_config": {},
        "quantization": None,
        "load_format": "auto",
        "served_model_name": None,
    }
    return Namespace(**(defaults | changes))


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    """A folder with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_tiny_ling_becomes_its_folder_and_keeps_its_name(validated: list[Path]) -> None:
    args = parsed("tiny-ling")
    preflight(args)
    folder = resolve_model("tiny-ling")
    assert args.model == args.model_tag == str(folder)
    assert args.served_model_name == ["tiny-ling"]
    assert validated == [folder]


def test_tiny_ling_from_a_config_file_and_a_chosen_name(validated: list[Path]) -> None:
    args = parsed("tiny-ling", model_tag=None, model="tiny-ling", served_model_name=["other"])
    preflight(args)
    assert args.model == str(resolve_model("tiny-ling"))
    assert args.served_model_name == ["other"]


def test_a_folder_called_tiny_ling_wins(
    validated: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("tiny-ling"), LING)
    args = parsed("tiny-ling")
    preflight(args)
    assert (args.model_tag, args.served_model_name) == ("tiny-ling", None)
    assert validated == [Path("tiny-ling")]


def test_local_ling_folders_are_checked_except_for_dummy_weights(
    validated: list[Path], tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "ling", LING)
    preflight(parsed(model, load_format="dummy"))
    assert validated == []
    preflight(parsed(model))
    assert validated == [Path(model)]


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}},
        {"architectures": None},
        {},
    ],
)
def test_other_models_pass_untouched(validated: list[Path], tmp_path: Path, config: dict[str, Any]) -> None:
    args = parsed(checkpoint(tmp_path, config), quantization="fp8")
    before = vars(args).copy()
    preflight(args)
    assert vars(args) == before
    assert validated == []


@pytest.mark.parametrize("model", ["somebody/some-model", "no/such/folder", "https://example.com/x.gguf"])
def test_names_that_are_not_here_are_left_to_vllm(validated: list[Path], model: str) -> None:
    args = parsed(model)
    before = vars(args).copy()
    preflight(args)
    assert vars(args) == before


def test_unreadable_config_is_left_to_vllm(validated: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    preflight(parsed(str(tmp_path)))
    assert validated == []


def test_quantization_by_hand_is_refused_for_a_quantized_checkpoint(
    validated: list[Path], tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "fp8", QUANTIZED)
    with pytest.raises(LingError, match=r"--quantization fp8: .*quantization_config \(quant_method 'fp8'\)"):
        preflight(parsed(model, quantization="fp8"))
    preflight(parsed(model, quantization="ling"))
    preflight(parsed(checkpoint(tmp_path / "bf16", LING), quantization="fp8"))


def test_unknown_option_is_refused_whatever_the_model(tmp_path: Path) -> None:
    with pytest.raises(LingError, match=r"unknown option ling\.fast"):
        preflight(parsed("somebody/some-model", additional_config={"ling": {"fast": True}}))


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_LING_DISABLE", "1"), ("VLLM_PLUGINS", "lora_filesystem,x")]
)
def test_off_switches_leave_everything_to_stock_vllm(
    validated: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    model = checkpoint(tmp_path, QUANTIZED)
    preflight(parsed(model, quantization="fp8", additional_config={"ling": {"fast": True}}))
    assert validated == []


@pytest.mark.parametrize(
    ("words", "model", "additional", "quantization"),
    [
        (["m", "--port", "1", "-q", "fp8"], "m", {}, "fp8"),
        (["m", "--additional_config", '{"ling": {}}', "--quantization=ling"], "m", {"ling": {}}, "ling"),
        (["--port", "8000", "m"], "", {}, None),
        (["--model", "m", "--dtype", "float32"], "m", {}, None),
        (["m", "--additional-config", "{bad"], "", {}, None),
        (["m", "--additional-config"], "", {}, None),
        ([], "", {}, None),
    ],
)
def test_plain_look_sees_plain_spellings_and_never_fails(
    words: list[str], model: str, additional: dict[str, Any], quantization: str | None
) -> None:
    args = _plain_look(words)
    assert (getattr(args, "model_tag", None) or args.model) == model
    assert (args.additional_config, args.quantization) == (additional, quantization)


def test_an_error_that_pydantic_wrapped_is_found_again() -> None:
    class Config(BaseModel):
        value: int

        @field_validator("value")
        @classmethod
        def check(cls, value: int) -> int:
            raise LingError("the head is tied") if value else ValueError("other")

    for value, expected in ((1, "the head is tied"), (0, "None")):
        with pytest.raises(ValidationError) as caught:
            Config(value=value)
        assert str(_user_error(caught.value)) == expected
