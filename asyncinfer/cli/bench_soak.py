"""`asyncinfer bench soak`: load over a long time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import SoakOptions, measure_soak
from asyncinfer.cli.bench_options import count, loop, number, quick, recorded
from asyncinfer.cli.bench_run import run_bench
from asyncinfer.cli.finite import FiniteRange

__all__ = ["soak"]


@click.command(short_help="What is left of an hour of load?")
@number("--seconds", 60.0, "Of the load; the other parts take a minute or two.", least=1.0)
@click.option("--minutes", type=FiniteRange(0.1), help="The same in minutes.")
@count("--streams", 2000, "Held at once.")
@number("--rate", 20_000, "Tokens a second.", least=1)
@count("--aborts", 10_000, "Requests left at random moments, half of them while tokenised.", 2)
@count("--cycles", 500, "Engines opened and closed, every tenth while it opens.")
@count("--live", 1000, "Streams when an engine is closed.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of all that is random.")
@loop
@quick
@recorded
def soak(
    json_path: Path | None,
    plot: Path | None,
    minutes: float | None,
    quick: bool,
    **options: Any,
) -> None:
    """Load over a long time on a fake model, every token compared with the right one.

    Streams that are read whole, slowly, or left in the middle, with prompts of a megabyte beside
    them; then aborts, opening and closing, a close with live streams, ten times too many callers,
    and callers that do not wait.
    """
    if minutes is not None:
        given = click.get_current_context().get_parameter_source("seconds")
        if given is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--seconds and --minutes say the same: give one of them")
        options["seconds"] = 60 * minutes
    if quick:
        options |= {"streams": 100, "rate": 5000.0, "seconds": 6.0, "overload_seconds": 1.0}
        options |= {"aborts": 200, "cycles": 20, "live": 50}
    run_bench("soak", SoakOptions(**options), measure_soak, json_path, plot)
