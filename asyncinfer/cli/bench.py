"""`asyncinfer bench`: measure the engine on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from asyncinfer import bench as its
from asyncinfer.cli.bench_cache import cache
from asyncinfer.cli.bench_gpu import decode, h200, kernels, prefill
from asyncinfer.cli.bench_load import load
from asyncinfer.cli.bench_run import FILE, SMOKE, print_record, run_bench

__all__ = ["bench"]

Function = TypeVar("Function", bound=Callable[..., Any])


def outputs(function: Function) -> Function:
    """The options every measurement has."""
    for option in (
        click.option("--plot", type=FILE, help="Draw a plot, such as out.png (bench extra)."),
        click.option("--json", "json_path", type=FILE, help="Write the record here."),
        click.option(
            "--repeat",
            type=click.IntRange(1),
            default=3,
            show_default=True,
            help="Repetitions; the median counts.",
        ),
    ):
        function = option(function)
    return function


@click.group()
def bench() -> None:
    """Measure the engine on this machine: one command per question.

    \b
    asyncinfer bench host      what does the engine itself cost per token?
    asyncinfer bench lag       how late does an event loop run its tasks beside it?
    asyncinfer bench serve     how many tokens a second do real models give?
    asyncinfer bench decode    how long do decode steps take, beside what they cannot do without?
    asyncinfer bench prefill   the same of prompts
    asyncinfer bench kernels   is every kernel right, and how near to its floor?
    asyncinfer bench h200      all of a GPU in ten minutes, with targets and peers
    asyncinfer bench cache     how much of a trace do cache policies find again?
    asyncinfer bench load      how long does a checkpoint take to load?
    asyncinfer bench plugins   what do plugins cost, used and unused?
    asyncinfer bench show      the tables of a record
    asyncinfer bench compare   what changed between two records?
    """


@bench.command()
@click.option(
    "--backend",
    "loops",
    multiple=True,
    type=click.Choice(its.LOOPS),
    help="Event loop; several may be given.  [default: all that are installed]",
)
@click.option(
    "--running", type=click.IntRange(1), default=256, show_default=True, help="Requests per step."
)
@click.option(
    "--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps measured."
)
@click.option(
    "--streams", type=click.IntRange(1), default=2000, show_default=True, help="Held at once."
)
@click.option(
    "--rate", type=click.FloatRange(1), default=20_000, show_default=True, help="Tokens a second."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    default=10.0,
    show_default=True,
    help="How long streams are held.",
)
@click.option(
    "--tokenizer",
    type=click.Choice(["shipped", "bytes"]),
    default="shipped",
    show_default=True,
    help="Whose vocabulary the fake model draws from.",
)
@click.option("--quick", is_flag=True, help=SMOKE)
@outputs
def host(
    loops: tuple[str, ...],
    json_path: Path | None,
    plot: Path | None,
    quick: bool,
    **options: Any,
) -> None:
    """What the engine costs, on a model that costs next to nothing.

    Scheduling per step, CPU per token on all threads until each consumer holds its chunk, and
    thousands of streams held at once at a fixed rate.
    """
    if quick:
        options |= {"running": 16, "steps": 20, "streams": 50, "rate": 1000, "seconds": 0.5}
    chosen = its.HostOptions(loops=loops or its.available_loops(), **options)
    run_bench("host", chosen, its.measure_host, json_path, plot)


@bench.command()
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    help=f"{its.SHIPPED!r}, a checkpoint's folder or hub id; several may be given.  "
    f"[default: {', '.join(its.FAKE_MODELS)}]",
)
@click.option(
    "--backend",
    "loop",
    type=click.Choice(its.LOOPS),
    default="asyncio",
    show_default=True,
    help="Event loop.",
)
@click.option(
    "--streams", type=click.IntRange(1), default=64, show_default=True, help="Decoding at once."
)
@click.option(
    "--prompt-bytes",
    type=click.IntRange(64),
    default=1_000_000,
    show_default=True,
    help="Of the long prompts.",
)
@click.option(
    "--senders",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Clients that send long prompts, one after the other.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    default=10.0,
    show_default=True,
    help="How long, idle and busy each.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    help="Of a step of the fake model.",
)
@click.option(
    "--gc-freeze", "freeze", is_flag=True, help="Call gc.freeze() once the engine is open."
)
@click.option("--quick", is_flag=True, help=SMOKE)
@outputs
def lag(
    models: tuple[str, ...],
    json_path: Path | None,
    plot: Path | None,
    quick: bool,
    **options: Any,
) -> None:
    """How much later an event loop runs its tasks beside a busy engine.

    A task sleeps a millisecond at a time and notes how late it wakes, with the engine idle and
    then with streams decoding while long prompts arrive.
    """
    if quick:
        options |= {"streams": 4, "prompt_bytes": 20_000, "senders": 1, "seconds": 0.5}
        options |= {"step_ms": 1.0}
    chosen = its.LagOptions(models=models or its.FAKE_MODELS, **options)
    run_bench("lag", chosen, its.measure_lag, json_path, plot)


@bench.command()
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    help=f"{its.SHIPPED!r}, {its.RANDOM!r} (random weights, made on the fly) or a folder; several "
    "may be given.  [default: the first two]",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    type=click.Choice(list(its.WORKLOADS)),
    help="Some of the workloads only; several may be given.",
)
@click.option("--peer/--no-peer", default=True, help="Run transformers' generate too.")
@click.option(
    "--peer-repeat",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Repetitions of it, at most: it takes most of the time.",
)
@click.option(
    "--backend",
    "loop",
    type=click.Choice(its.LOOPS),
    default="asyncio",
    show_default=True,
    help="Event loop.",
)
@click.option("--quick", is_flag=True, help=SMOKE)
@outputs
def serve(
    models: tuple[str, ...],
    columns: tuple[str, ...],
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Tokens a second of real models on the CPU in float32, beside transformers' generate.

    One request, 16 at once, 64 mixed ones, a prefill, requests that share a prefix, and the
    event loop's lag meanwhile. Thread counts are torch's own; the table's last line says which.
    """
    chosen = its.ServeOptions(
        models=models or (its.SHIPPED, its.RANDOM),
        columns=columns or tuple(its.WORKLOADS),
        **options,
    )
    run_bench("serve", chosen, its.measure_serve, json_path, plot)


@bench.command()
@click.option(
    "--running", type=click.IntRange(1), default=256, show_default=True, help="Requests per step."
)
@click.option(
    "--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps measured."
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Rows that sampler plugins are given.",
)
@click.option(
    "--vocab-size", type=click.IntRange(64), default=32_000, show_default=True, help="Of the rows."
)
@click.option(
    "--backend",
    "loop",
    type=click.Choice(its.LOOPS),
    default="asyncio",
    show_default=True,
    help="Event loop.",
)
@click.option("--quick", is_flag=True, help=SMOKE)
@outputs
def plugins(json_path: Path | None, plot: Path | None, quick: bool, **options: Any) -> None:
    """What plugins cost those who use them, and those who do not.

    Steps of the engine on a fake model with and without plugins that nobody uses, with and
    without observers; rows sampled by plugins, beside the same work done by the built-in chain.
    All in CPU time, and in turns.
    """
    if quick:
        options |= {"running": 8, "steps": 10, "rows": 4, "vocab_size": 256}
    run_bench("plugins", its.PluginOptions(**options), its.measure_plugins, json_path, plot)


@bench.command()
@click.argument("record", type=FILE)
@click.option("--plot", type=FILE, help="Draw a plot, such as out.png (bench extra).")
def show(record: Path, plot: Path | None) -> None:
    """Print the tables of RECORD, as the run that made it did."""
    loaded = its.Record.load(record)
    if plot is not None:
        its.save_plot(loaded, plot)
    print_record(loaded)


@bench.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
def compare(before: Path, after: Path) -> None:
    """What changed from the record BEFORE to the record AFTER."""
    one, other = its.Record.load(before), its.Record.load(after)
    found = its.changes(one, other)
    console = Console()
    console.print(its.change_table(found))
    different = its.differences(one, other)
    if different:
        console.print(its.difference_table(different))


for command in (cache, decode, h200, kernels, load, prefill):
    bench.add_command(command)
