# SPDX-License-Identifier: Apache-2.0
"""The commands under `vllm-ling eval`: arguments only; each imports the module that does the work."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from vllm_ling.errors import LingError

evaluation = typer.Typer(no_args_is_help=True, help="Evaluate a server, and compare results.")
_WITH_SERVER = {"allow_extra_args": True}
Url = Annotated[str | None, typer.Option(help="A running server; else MODEL and serve flags after --.")]
Model = Annotated[str | None, typer.Option(help="Served name, where the server has several.")]
Label = Annotated[str | None, typer.Option(help="Name of the run in reports.")]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what an interrupted run left.")]
Task = Annotated[Literal["gsm8k", "gsm8k_cot", "tiny_ling"], typer.Option(help="lm-eval's task.")]
Data = Annotated[Path | None, typer.Option(help="Questions as jsonl, instead of lm-eval's own data set.")]
FewshotData = Annotated[Path | None, typer.Option(help="Examples as jsonl, with --data.")]
Fewshot = Annotated[int | None, typer.Option(min=0, help="Examples; default the task's own number.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first items.")]
Api = Annotated[Literal["chat", "completions"], typer.Option(help="With the chat template, or plain text.")]
Thinking = Annotated[Literal["on", "off", "model"], typer.Option(help="Reasoning; model: its own default.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Budget of an answer, reasoning included.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
Text = Annotated[Path | None, typer.Option(help="Text that synthetic prompts are cut from.")]
RandomTokens = Annotated[bool, typer.Option("--random-tokens", help="Prompts of random tokens instead.")]
Isl = Annotated[int, typer.Option(min=1, help="Prompt tokens.")]
Osl = Annotated[int, typer.Option(min=2, help="Output tokens.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests a repeat.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats, for the spread.")]
Timeout = Annotated[float, typer.Option(min=1, help="Longest silence of the server, seconds.")]


class PassThrough(TyperCommand):
    """A command that leaves every argument, `--help` and `--` included, to another parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@evaluation.command("gsm8k", context_settings=_WITH_SERVER)
def eval_gsm8k(
    ctx: typer.Context,
    url: Url = None,
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("build/gsm8k.json"),
    task: Task = "gsm8k",
    data: Data = None,
    fewshot_data: FewshotData = None,
    fewshot: Fewshot = None,
    limit: Limit = None,
    api: Api = "chat",
    thinking: Thinking = "model",
    max_tokens: MaxTokens = 4096,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="With a temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With a temperature.")] = None,
    concurrency: Concurrency = 1,
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a request that failed.")] = 2,
    timeout: Timeout = 120.0,
    label: Label = None,
    restart: Restart = False,
) -> None:
    """GSM8K through lm-eval: its scores, and speed and acceptance of the same answers. Resumes by itself."""
    from vllm_ling.eval.runs.commands import Run, gsm8k
    from vllm_ling.eval.runs.gsm8k import Gsm8k

    if temperature == 0 and (top_p is not None or top_k is not None):
        raise LingError("--top-p and --top-k need a --temperature above 0")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    what = Gsm8k(
        task=task,
        data=data,
        fewshot_data=fewshot_data,
        fewshot=fewshot,
        limit=limit,
        chat=api == "chat",
        thinking=None if thinking == "model" else thinking == "on",
        max_tokens=max_tokens,
        sampling={name: value for name, value in sampling.items() if value is not None},
        concurrency=concurrency,
        retries=retries,
        timeout_s=timeout,
    )
    raise typer.Exit(gsm8k(what, Run(url, ctx.args, model, out, label, restart)))


@evaluation.command("synthetic", context_settings=_WITH_SERVER)
def eval_synthetic(
    ctx: typer.Context,
    url: Url = None,
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("build/synthetic.json"),
    text: Text = None,
    random_tokens: RandomTokens = False,
    isl: Isl = 1024,
    osl: Osl = 256,
    requests: Requests = 4,
    repeats: Repeats = 3,
    concurrency: Concurrency = 1,
    timeout: Timeout = 120.0,
    label: Label = None,
    restart: Restart = False,
) -> None:
    """Fixed prompt and output lengths, from real text or (labelled as such) random tokens."""
    from vllm_ling.eval.runs.commands import Run, choose_text, synthetic
    from vllm_ling.eval.runs.synthetic import Synthetic

    what = Synthetic(
        text=choose_text(text, random_tokens),
        isl=isl,
        osl=osl,
        requests=requests,
        repeats=repeats,
        concurrency=concurrency,
        timeout_s=timeout,
    )
    raise typer.Exit(synthetic(what, Run(url, ctx.args, model, out, label, restart)))


@evaluation.command("ablate", context_settings=_WITH_SERVER)
def eval_ablate(
    ctx: typer.Context,
    stages: Annotated[
        str, typer.Option(help="Comma-separated: stock, baseline, moe, head, mtp, or names with --flags.")
    ] = "baseline,moe,head,mtp",
    flags: Annotated[
        list[str] | None, typer.Option(help="NAME=SERVE FLAGS for one stage; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("build/ablation"),
    task: Task = "gsm8k",
    data: Data = None,
    fewshot_data: FewshotData = None,
    fewshot: Fewshot = None,
    limit: Limit = None,
    thinking: Thinking = "model",
    max_tokens: MaxTokens = 4096,
    text: Text = None,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Prompts of random tokens too, or only them.")
    ] = False,
    isl: Isl = 1024,
    osl: Osl = 256,
    requests: Requests = 4,
    repeats: Repeats = 3,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times every stage's synthetic load is measured, order alternating.")
    ] = 1,
    margin: Annotated[float, typer.Option(help="Largest loss of accuracy that passes.")] = 0.01,
    random_weights: Annotated[
        Literal["flash", "mini"] | None,
        typer.Option(help="No MODEL: its shape with random weights, synthetic loads only."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=3, help="Decoder layers of the random weights; default all.")
    ] = None,
    accept_length: Annotated[
        float | None, typer.Option(help="Of their drafts, by lot (GPU only); default 2.68.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on with the other stages where one fails.")
    ] = False,
    restart: Restart = False,
) -> None:
    """One server per stage, GSM8K and synthetic loads on each: the ablation table for this machine."""
    from vllm_ling.eval.ablation.command import Asked, ablate
    from vllm_ling.eval.ablation.random_model import LAYERS, RandomModel
    from vllm_ling.eval.runs.gsm8k import Gsm8k
    from vllm_ling.eval.runs.synthetic import Synthetic

    texts = [*([text] if text else []), *([None] if random_tokens else [])]
    if not texts:
        raise LingError("a synthetic load needs --text FILE, --random-tokens, or both")
    if layers is not None and random_weights is None:
        raise LingError("--layers: only --random-weights can be cut")
    questions = Gsm8k(
        task=task,
        data=data,
        fewshot_data=fewshot_data,
        fewshot=fewshot,
        limit=limit,
        thinking=None if thinking == "model" else thinking == "on",
        max_tokens=max_tokens,
    )
    asked = Asked(
        stages=stages,
        flags=flags or [],
        serve=ctx.args,
        questions=None if random_weights else questions,
        loads=[Synthetic(one, isl=isl, osl=osl, requests=requests, repeats=repeats) for one in texts],
        rounds=rounds,
        margin=margin,
        out=out,
        restart=restart,
        random=RandomModel(random_weights, layers or LAYERS[random_weights]) if random_weights else None,
        accept_length=accept_length,
        keep_going=keep_going,
    )
    raise typer.Exit(ablate(asked))


@evaluation.command("ablation-report")
def eval_ablation_report(
    result: Annotated[Path, typer.Argument(help="ablation.json; .md and .svg go beside it.")],
) -> None:
    """The result of eval ablate as a markdown table and a plot (eval ablate writes both itself)."""
    from vllm_ling.eval.ablation.page import write_page

    print(write_page(result), end="")


@evaluation.command("mock", cls=PassThrough, add_help_option=False)
def eval_mock(ctx: typer.Context) -> None:
    """A stand-in for a server with known speed, accept length and failures (`mock --help` shows the flags)."""
    from vllm_ling.eval.serving.mock_server import main

    main(ctx.args)


@evaluation.command("compare")
def eval_compare(
    first: Annotated[Path, typer.Argument(help="Result file to compare with.")],
    second: Annotated[Path, typer.Argument(help="Result file to judge.")],
    margin: Annotated[float, typer.Option(help="Largest loss of accuracy that passes.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Two result files, item by item: accuracy, speed, and what may be claimed of the difference."""
    from vllm_ling.eval.report.compare import run

    raise typer.Exit(run(first, second, margin, as_json))


@evaluation.command("report")
def eval_report(
    files: Annotated[
        list[Path], typer.Argument(help="Result files; the others are compared with the first.")
    ],
    out: Annotated[Path, typer.Option(help="Where the HTML page goes.")],
    markdown: Annotated[str | None, typer.Option(help="Where the markdown text goes; - for stdout.")] = None,
    margin: Annotated[float, typer.Option(help="Largest loss of accuracy that passes.")] = 0.01,
) -> None:
    """Result files as one self-contained page: figures, plots, paired comparison, origin."""
    from vllm_ling.eval.report.html import run

    run(files, out, markdown, margin)
