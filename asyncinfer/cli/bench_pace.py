"""`asyncinfer bench pace`: how evenly streams go on beside a long prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import PaceOptions, measure_pace
from asyncinfer.cli.bench_options import count, dtype, loop, model, number, quick, repeat
from asyncinfer.cli.bench_run import run_bench
from asyncinfer.cli.new_file import NewFile

__all__ = ["pace"]


@click.command(short_help="How evenly do streams go on beside a long prompt?")
@model
@count("--streams", 8, "Decoding at once.")
@count("--prompt-tokens", 8000, "Of the prompt that arrives.", least=2)
@number("--step-target", 0.1, "Seconds that a step should take.", least=0.001)
@dtype
@loop
@quick
@repeat()
@click.option("--json", "json_path", type=NewFile(), help="Write the record here.")
def pace(json_path: Path | None, **options: Any) -> None:
    """How evenly streams go on while a long prompt is computed beside them, and the price of that.

    On the CPU: a prompt alone, then one beside streams, with `step_target` and without, in turns.
    """
    if options["quick"]:
        options |= {"streams": 2, "prompt_tokens": min(options["prompt_tokens"], 200)}
        options |= {"repeat": 1, "step_target": 0.01}
    run_bench("pace", PaceOptions(**options), measure_pace, json_path, None)
