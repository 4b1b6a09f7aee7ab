# SPDX-License-Identifier: Apache-2.0
"""The subcommands of `vllm-ling bench`; each imports the module that does the work only when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure speed on this GPU with random weights.")


@bench.command("kernels")
def bench_kernels(
    against: Annotated[
        Literal["none", "stock"], typer.Option(help="stock: measure vLLM's own path in the same run.")
    ] = "none",
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("build/kernels.json"),
) -> None:
    """Our kernels on Ling-3.0-flash's shapes: time, byte floor, error, and vLLM beside them."""
    from vllm_ling.bench.run import kernels

    raise typer.Exit(kernels(None if against == "none" else against, out))


@bench.command("decode")
def bench_decode(
    against: Annotated[
        Literal["none", "stock"], typer.Option(help="stock: the same workload on stock vLLM, same run.")
    ] = "none",
    model: Annotated[
        Literal["flash", "mini"], typer.Option(help="Full-size shapes, or small ones of the same structure.")
    ] = "flash",
    layers: Annotated[int, typer.Option(min=3, help="Decoder layers; 42 is the whole of flash.")] = 42,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Prompt tokens; may be repeated.")] = None,
    draft: Annotated[
        list[int] | None, typer.Option(min=0, max=7, help="MTP draft tokens, 0 for none; may be repeated.")
    ] = None,
    accept_length: Annotated[float, typer.Option(help="Synthetic accept length with drafts.")] = 2.68,
    ours: Annotated[
        list[str] | None,
        typer.Option(help="Options of our side as a JSON object; repeat it to compare some."),
    ] = None,
    extras: Annotated[
        Literal["none", "also", "only"], typer.Option(help="A prefill of 8192 tokens, and 32 sequences.")
    ] = "none",
    dram: Annotated[bool, typer.Option("--dram", help="Read DRAM counters with ncu at the end.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Keep the other rows that OUT holds.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("build/decode.json"),
    timeout: Annotated[int, typer.Option(min=60, help="Seconds for one engine, its start included.")] = 900,
) -> None:
    """Decode with random weights made on the GPU: milliseconds per token, stock vLLM beside."""
    from vllm_ling.bench.decode import Plan, decode

    plan = Plan(
        model=model,
        layers=layers,
        contexts=tuple(context or [128]),
        drafts=tuple(draft or [0]),
        accept=accept_length,
        ours=tuple(ours or []),
        stock=against == "stock",
        extras=extras,
        dram=dram,
        merge=merge,
        out=out,
        timeout=timeout,
    )
    raise typer.Exit(decode(plan))


@bench.command("report")
def bench_report(
    result: Annotated[Path, typer.Argument(help="JSON of bench decode; .md and .svg go beside it.")],
) -> None:
    """The result of bench decode as a markdown table and a plot (bench decode writes both itself)."""
    from vllm_ling.bench.report import write_report

    write_report(result)
