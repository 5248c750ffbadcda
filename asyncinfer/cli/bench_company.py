"""`asyncinfer bench company`: what streams keep beside other work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import CompanyOptions, measure_company
from asyncinfer.cli.bench_options import count, dtype, loop, model, quick, repeat, several
from asyncinfer.cli.bench_run import run_bench
from asyncinfer.cli.new_file import NewFile

__all__ = ["company"]


@click.command(short_help="What do streams keep beside a busy program?")
@model
@several("--streams", what="Decoding at once", kind=click.IntRange(1), default=(1, 8))
@count("--tokens", 128, "Of each stream's answer.")
@dtype
@loop
@quick
@repeat(5)
@click.option("--json", "json_path", type=NewFile(), help="Write the record here.")
def company(json_path: Path | None, **options: Any) -> None:
    """The tokens a second that streams keep beside a thread of the program that holds the GIL half
    of the time, and beside another program that computes half of the time.

    On the CPU, in turns with streams that have no company.
    """
    if options["quick"]:
        options |= {"streams": (1, 2), "tokens": 8, "repeat": 1}
    run_bench("company", CompanyOptions(**options), measure_company, json_path, None)
