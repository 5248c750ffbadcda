"""`asyncinfer bench constrained`: what structured output costs, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import ConstrainedOptions, measure_constrained
from asyncinfer.cli.bench_options import count, loop, quick, recorded, repeat
from asyncinfer.cli.bench_run import run_bench

__all__ = ["constrained"]


@click.command(short_help="What does structured output cost, and spare?")
@click.option("-m", "--model", help="A checkpoint's folder.  [default: the shipped model]")
@count("--running", 32, "Requests decoded together.")
@count("--tokens", 96, "Tokens of each.", least=8)
@count("--schemas", 100, "New schemas that arrive while the event loop is watched.")
@loop
@quick
@repeat(5)
@recorded
def constrained(json_path: Path | None, plot: Path | None, quick: bool, **options: Any) -> None:
    """What structured output costs, and what it saves.

    The same number of requests and tokens without a constraint, under a schema in which little has
    to follow, and under one in which much has to; in turns. Then how long new schemas take to
    compile, and how late the event loop is while they arrive.
    """
    if quick:
        options |= {"running": 4, "tokens": 16, "schemas": 5, "repeat": 1}
    run_bench("constrained", ConstrainedOptions(**options), measure_constrained, json_path, plot)
