"""`asyncinfer bench serve`: tokens a second of real models, beside other engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import (
    PEERS,
    RANDOM,
    SHIPPED,
    WORKLOADS,
    BenchError,
    ServeOptions,
    measure_serve,
    parse_peers,
)
from asyncinfer.cli.bench_options import count, dtype, loop, quick, recorded, repeat, several
from asyncinfer.cli.bench_run import run_bench
from asyncinfer.cli.finite import FiniteRange

__all__ = ["serve"]


@click.command(short_help="How many tokens a second do real models give?")
@several(
    "-m",
    "--model",
    "models",
    what=f"{SHIPPED!r}, {RANDOM!r} (random weights, made on the fly) or a folder",
    without="the first two",
)
@several("--column", "columns", what="Some of the workloads only", kind=tuple(WORKLOADS))
@dtype
@several(
    "--peer",
    "peers",
    what=f"Another engine for the same work ({', '.join(PEERS)}), or NAME=PYTHON that has it",
    without="those that are installed",
)
@click.option("--no-peer", is_flag=True, help="Run no other engine.")
@count("--peer-repeat", 3, "Repetitions of the others, at most: they take most of the time.")
@click.option(
    "--peer-seconds",
    type=FiniteRange(0.0, min_open=True),
    default=120.0,
    show_default=True,
    help="For opening another engine, and for each of its turns; it takes no further ones then.",
)
@click.option(
    "--interference/--no-interference",
    default=True,
    help="Run one and sixteen beside programs that keep half of the cores busy, too.",
)
@loop
@quick
@repeat()
@recorded
def serve(
    models: tuple[str, ...],
    columns: tuple[str, ...],
    peers: tuple[str, ...],
    no_peer: bool,
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Tokens a second of real models on the CPU, beside other engines that are installed.

    One request, 16 at once, 64 mixed ones, a prefill, requests that share a prefix, and the
    event loop's lag meanwhile. All engines take turns on the same work in one run, with torch's
    own number of threads each; the table's last line says which.
    """
    if no_peer:
        if peers:
            raise click.UsageError("--peer and --no-peer exclude each other")
        options["peers"] = ()
    try:
        pythons = parse_peers(peers)
    except BenchError as error:
        raise click.UsageError(str(error)) from error
    if peers:
        options["peers"] = tuple(pythons)
    chosen = ServeOptions(
        models=models or (SHIPPED, RANDOM), columns=columns or tuple(WORKLOADS), **options
    )
    run_bench("serve", chosen, partial(measure_serve, pythons=pythons), json_path, plot)
