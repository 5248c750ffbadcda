"""`asyncinfer bench`: measure the engine on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from asyncinfer.bench import (
    FAKE_MODELS,
    LOOPS,
    SHIPPED,
    BenchError,
    HostOptions,
    LagOptions,
    PluginOptions,
    Record,
    available_loops,
    change_table,
    changes,
    difference_table,
    differences,
    from_checkout,
    measure_host,
    measure_lag,
    measure_plugins,
    save_plot,
)
from asyncinfer.cli.bench_accuracy import accuracy
from asyncinfer.cli.bench_adapters import adapters
from asyncinfer.cli.bench_cache import cache
from asyncinfer.cli.bench_company import company
from asyncinfer.cli.bench_constrained import constrained
from asyncinfer.cli.bench_http import http
from asyncinfer.cli.bench_load import load
from asyncinfer.cli.bench_options import (
    FILE,
    count,
    loop,
    number,
    quick,
    recorded,
    repeat,
    several,
)
from asyncinfer.cli.bench_pace import pace
from asyncinfer.cli.bench_quantized import quantized
from asyncinfer.cli.bench_route import route
from asyncinfer.cli.bench_run import print_record, run_bench
from asyncinfer.cli.bench_serve import serve
from asyncinfer.cli.bench_soak import soak
from asyncinfer.cli.bench_speculate import speculate
from asyncinfer.cli.options import sampler_option
from asyncinfer.cli.start import raise_again

__all__ = ["bench"]

#: Commands that measure the engine's internals -> help. A checkout has them, a wheel does not.
INTERNALS: Final = {
    "decode": "How long are decode steps, beside their floor?",
    "h200": "All of a GPU in ten minutes, with targets and peers.",
    "kernels": "Is every kernel right, and how near to its floor?",
    "prefill": "How long do prompts take, beside their floor?",
}


class BenchGroup(click.Group):
    """Finds its own commands, and in a checkout those that measure internals."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *INTERNALS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in INTERNALS:
            return super().get_command(ctx, cmd_name)
        try:
            command = getattr(from_checkout("commands"), cmd_name)
        except BenchError as error:
            return _missing(cmd_name, error)
        assert isinstance(command, click.Command)
        return command


def _missing(name: str, error: BenchError) -> click.Command:
    """A command that takes any arguments and says why it cannot run."""

    def refuse() -> None:
        raise error

    return click.Command(
        name,
        callback=refuse,
        short_help=INTERNALS[name],
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure the engine on this machine: one command per question."""
    raise_again()


@bench.command(short_help="What does the engine itself cost per token?")
@several("--backend", "loops", what="Event loop", kind=LOOPS, without="all that are installed")
@count("--running", 256, "Requests per step.")
@count("--steps", 200, "Steps measured.")
@count("--streams", 2000, "Held at once.")
@number("--rate", 20_000, "Tokens a second.", least=1)
@number("--seconds", 10.0, "How long streams are held.", least=0.1)
@click.option(
    "--tokenizer",
    type=click.Choice(["shipped", "bytes"]),
    default="shipped",
    show_default=True,
    help="Whose vocabulary the fake model draws from.",
)
@quick
@repeat()
@recorded
def host(
    loops: tuple[str, ...],
    json_path: Path | None,
    plot: Path | None,
    quick: bool,
    **options: Any,
) -> None:
    """What the engine costs, on a model that costs next to nothing.

    CPU per token on all threads until each consumer holds its chunk, and thousands of streams held
    at once at a fixed rate; in a checkout also scheduler and runner per step.
    """
    if quick:
        options |= {"running": 16, "steps": 20, "streams": 50, "rate": 1000, "seconds": 0.5}
    chosen = HostOptions(loops=loops or available_loops(), **options)
    run_bench("host", chosen, measure_host, json_path, plot)


@bench.command(short_help="How late does an event loop run its tasks beside it?")
@several(
    "-m",
    "--model",
    "models",
    what=f"{SHIPPED!r}, a checkpoint's folder or hub id",
    without=", ".join(FAKE_MODELS),
)
@loop
@count("--streams", 64, "Decoding at once.")
@count("--prompt-bytes", 1_000_000, "Of the long prompts.", least=64)
@count("--senders", 2, "Clients that send long prompts, one after the other.")
@number("--seconds", 10.0, "How long, idle and busy each.", least=0.1)
@number("--step-ms", 5.0, "Of a step of the fake model.", least=0.0)
@click.option(
    "--gc-freeze", "freeze", is_flag=True, help="Call gc.freeze() once the engine is open."
)
@quick
@repeat()
@recorded
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
    chosen = LagOptions(models=models or FAKE_MODELS, **options)
    run_bench("lag", chosen, measure_lag, json_path, plot)


@bench.command(short_help="What do plugins cost, used and unused?")
@count("--running", 256, "Requests per step.")
@count("--steps", 200, "Steps measured.")
@count("--rows", 64, "Rows that sampler plugins are given.")
@count("--vocab-size", 32_000, "Of the rows.", least=64)
@sampler_option
@loop
@quick
@repeat()
@recorded
def plugins(json_path: Path | None, plot: Path | None, quick: bool, **options: Any) -> None:
    """What plugins cost those who use them, and those who do not.

    Steps of the engine on a fake model with and without plugins that nobody uses, with and
    without observers; rows sampled by plugins, beside the same work done by the built-in chain.
    All in CPU time, and in turns. With --sampler also what those cost, called in order.
    """
    if quick:
        options |= {"running": 8, "steps": 10, "rows": 4, "vocab_size": 256}
    run_bench("plugins", PluginOptions(**options), measure_plugins, json_path, plot)


@bench.command(short_help="The tables of a record.")
@click.argument("record", type=FILE)
@click.option("--plot", type=FILE, help="Draw a plot, such as out.png (bench extra).")
def show(record: Path, plot: Path | None) -> None:
    """Print RECORD as tables."""
    loaded = Record.load(record)
    if plot is not None:
        save_plot(loaded, plot)
    print_record(loaded)


@bench.command(short_help="What changed between two records?")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
def compare(before: Path, after: Path) -> None:
    """What changed from the record BEFORE to the record AFTER."""
    one, other = Record.load(before), Record.load(after)
    found = changes(one, other)
    console = Console()
    console.print(change_table(found))
    different = differences(one, other)
    if different:
        console.print(difference_table(different))


for command in (
    *(accuracy, adapters, cache, company, constrained, http, load),
    *(pace, quantized, route, serve, soak, speculate),
):
    bench.add_command(command)
