"""`asyncinfer bench speculate`: what guessed tokens save, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import SpeculateOptions, measure_speculate
from asyncinfer.cli.bench_options import count, loop, number, quick, recorded, repeat
from asyncinfer.cli.bench_run import run_bench

__all__ = ["speculate"]


@click.command(short_help="What do guessed tokens save, and cost?")
@click.option("-m", "--model", help="A folder, hub id or known name.  [default: the shipped model]")
@count("--tokens", 160, "Tokens of each answer.", least=8)
@count("--running", 16, "Requests decoded together, beside one alone.")
@number("--seconds", 210.0, "No turn begins that would end later.", least=0.0)
@loop
@quick
@repeat(5)
@recorded
def speculate(json_path: Path | None, plot: Path | None, quick: bool, **options: Any) -> None:
    """What guessed tokens save, and what they cost where there is nothing to guess.

    A file that the model copies, with a prediction that is wrong in four places and with
    prompt-lookup; a text that does not repeat itself, with prompt-lookup and with a prediction that
    has nothing to do with it. All in turns, and answers are compared.
    """
    if quick:
        options |= {"running": 2, "tokens": 12, "repeat": 1}
    run_bench("speculate", SpeculateOptions(**options), measure_speculate, json_path, plot)
