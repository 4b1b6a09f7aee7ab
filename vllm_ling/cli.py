# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ling`: parses arguments and calls the module that does the work, which it imports only then.

To add a subcommand, write a function here with `@app.command()` whose body imports one module and calls it.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_ling import __version__
from vllm_ling.cli_bench import bench
from vllm_ling.cli_eval import Data, FewshotData, PassThrough, Restart, evaluation
from vllm_ling.errors import LingError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from vllm_ling.compat import SUPPORTED_VLLM, installed_vllm

        typer.echo(
            f"vllm-ling {__version__} (vLLM {installed_vllm() or 'not installed'}, supported {SUPPORTED_VLLM})"
        )
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Serve Ling-3.0 models with vLLM: FP8 head, MXFP4 experts, MTP with the shared head."""


@app.command(cls=PassThrough, add_help_option=False)
def serve(ctx: typer.Context) -> None:
    """vLLM's own server with its own flags, after a check of model and options (`serve --help` shows the flags)."""
    from vllm_ling.serve import serve as run

    run(ctx.args)


@app.command()
def quantize(
    src: Annotated[
        str, typer.Argument(help="BF16 Ling checkpoint: a folder, a cached model name or tiny-ling.")
    ],
    dst: Annotated[Path, typer.Argument(help="Folder for the quantized checkpoint.")],
    format: Annotated[Literal["fp4", "fp8", "int4"], typer.Option(help="Official format to write.")] = "fp4",
    head: Annotated[Literal["bf16", "fp8"], typer.Option(help="How to store the output head.")] = "bf16",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep the finished shards of an interrupted run.")
    ] = True,
) -> None:
    """Quantize a BF16 Ling checkpoint, shard by shard."""
    from vllm_ling.checkpoint.locate import resolve_model

    folder = resolve_model(src)
    if folder is None:
        raise LingError(f"{src}: neither a folder nor a model in the local cache")
    from vllm_ling.quant.convert import run

    run(folder, dst, fmt=format, head=head, resume=resume)


@app.command("tiny-path")
def tiny_path() -> None:
    """Print the folder of the bundled model tiny-ling."""
    from vllm_ling.checkpoint.locate import resolve_model

    typer.echo(resolve_model("tiny-ling"))


@app.command()
def demo(
    items: Annotated[int, typer.Option(min=2, help="Held-out problems per stage.")] = 32,
    out: Annotated[Path, typer.Option(help="Where the JSON goes; server logs go beside it.")] = Path(
        "build/demo.json"
    ),
    stages: Annotated[str, typer.Option(help="Comma-separated stages, default all.")] = "",
) -> None:
    """Serve tiny-ling with one optimization more at a time, then with two faults on purpose, and compare."""
    from vllm_ling.eval.demo.run import run

    raise typer.Exit(run(items=items, out=out, stages=[name for name in stages.split(",") if name]))


@app.command()
def roofline(
    model: Annotated[
        str, typer.Option(help="flash, tiny, tiny-ling, a folder or a cached model name.")
    ] = "flash",
    format: Annotated[
        str | None, typer.Option(help="bf16, fp8, fp4 or int4; default the checkpoint's own, fp4 for flash.")
    ] = None,
    head: Annotated[Literal["auto", "bf16", "fp8"], typer.Option(help="Stored output head.")] = "auto",
    k: Annotated[str | None, typer.Option(help="Draft lengths, comma-separated; default 0,1,2,3.")] = None,
    acceptance: Annotated[float, typer.Option(help="Acceptance of each draft position.")] = 0.74,
    accept_length: Annotated[float | None, typer.Option(help="Accept length, with one --k.")] = None,
    context: Annotated[int, typer.Option(help="Tokens in the KV cache.")] = 0,
    machine: Annotated[list[str] | None, typer.Option(help="gb10, h200, ...; default all known.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the present GPU by a copy.")] = False,
    results: Annotated[Path | None, typer.Option(help="Decode result file to set beside.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict TPOT and tok/s from the bytes a token must read."""
    from vllm_ling.roofline.report import run

    run(model, format, head, k, acceptance, accept_length, context, machine or [], measure, results, as_json)


@app.command()
def tune(
    model: Annotated[
        str, typer.Argument(help="flash, tiny-ling, a folder or a cached model name.")
    ] = "flash",
    gpu: Annotated[
        str | None, typer.Option(help="h100, h200, gb10, rtx-pro-6000; default the GPU at hand.")
    ] = None,
) -> None:
    """Build the GPU kernels of a model ahead of its first start."""
    from vllm_ling.quant.tune import run

    raise typer.Exit(run(model, gpu))


@app.command("draft-vocab")
def draft_vocab(
    model: Annotated[str, typer.Argument(help="tiny-ling, a folder or a cached model name.")],
    source: Annotated[
        list[Path],
        typer.Option(
            "--from", help="Text, or .jsonl with text, prompt, question, answer or messages; repeat it."
        ),
    ],
    rows: Annotated[int, typer.Option(help="Tokens to keep, special ones included.")] = 32768,
    out: Annotated[Path, typer.Option(help="Where the list goes.")] = Path("draft-vocab.json"),
) -> None:
    """List the tokens worth drafting, by their frequency in text such as the model writes for you."""
    from vllm_ling.spec_decode.count_tokens import run

    run(model, source, rows, out)


app.add_typer(bench, name="bench")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    ctx: typer.Context,
    url: Annotated[str | None, typer.Option(help="A running server.")] = None,
    log: Annotated[Path | None, typer.Option(help="A server log.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between the two readings of /metrics.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explain: Annotated[str | None, typer.Option(help="Explain a check.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the sound findings too.")] = False,
) -> None:
    """Find what is slow or wrong in silence: doctor MODEL (and serve flags), --url URL, --log FILE."""
    from vllm_ling.doctor.run import run

    raise typer.Exit(run(ctx.args, url, log, interval, as_json, explain, everything))


@app.command(context_settings={"allow_extra_args": True})
def verify(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a cached model name or tiny-ling.")],
    parts: Annotated[
        str, typer.Option(help="Comma-separated: head, kernels, logits, greedy, gsm8k, speed; default all.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Where the JSON goes; the page and finished parts beside it.")
    ] = Path("build/verify.json"),
    restart: Restart = False,
    reference: Annotated[
        str | None, typer.Option(help="The same model from another source, such as the BF16 original.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers to look at.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for logits and greedy.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that greedy writes to each.")] = 64,
    items: Annotated[int, typer.Option(min=1, help="GSM8K items.")] = 50,
    task: Annotated[
        Literal["gsm8k", "gsm8k_cot", "tiny_ling"] | None,
        typer.Option(help="lm-eval's task; default by model and data."),
    ] = None,
    data: Data = None,
    fewshot_data: FewshotData = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Budget of a GSM8K answer.")] = None,
    expect_accuracy: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="True share of right answers of a sound server.")
    ] = 0.9,
    minutes: Annotated[float, typer.Option(min=0, max=1440, help="Length of the speed run.")] = 10.0,
    expect_tok_s: Annotated[float, typer.Option(min=0, help="Slower than this is called slow.")] = 0.0,
) -> None:
    """Check a real checkpoint on this machine, part by part; serve flags after --. Resumes by itself."""
    from vllm_ling.verify.command import verify as run

    code = run(
        model,
        ctx.args,
        parts,
        out,
        restart=restart,
        reference=reference,
        task=task,
        data=data,
        fewshot_data=fewshot_data,
        max_tokens=max_tokens,
        layers=layers,
        prompts=prompts,
        tokens=tokens,
        items=items,
        expect_accuracy=expect_accuracy,
        minutes=minutes,
        expect_tok_per_s=expect_tok_s,
    )
    raise typer.Exit(code)


app.add_typer(evaluation, name="eval")


def main() -> None:
    """Entry point: a LingError becomes one line on stderr and exit code 2."""
    try:
        app(prog_name="vllm-ling")
    except LingError as error:
        print(f"vllm-ling: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
