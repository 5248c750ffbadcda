"""`asyncinfer bench adapters`: LoRA adapters of requests that decode together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import AdapterOptions, measure_adapters
from asyncinfer.cli.bench_options import count, quick, recorded
from asyncinfer.cli.bench_run import run_bench

__all__ = ["adapters"]


@click.command(short_help="What do LoRA adapters cost on this CPU, one for all or one each?")
@click.option("-m", "--model", help="A folder, GGUF file, hub id or name.  [default: smollm2]")
@count("--running", 16, "Requests at once, each with its adapter.")
@count("--prompt", 32, "Tokens of a prompt.")
@count("--tokens", 64, "Tokens of an answer.", least=2)
@click.option("--threads", type=click.IntRange(1), help="Of the engine.  [default: torch's]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="What the adapters' files hold.",
)
@count("--repeat", 5, "How often each is measured, in turns; the median counts.")
@quick
@recorded
def adapters(json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """Requests that run together on the CPU: without adapters, with one for all of them, and with
    one for each, of ranks 4 to 32. Prompts are not counted."""
    run_bench("adapters", AdapterOptions(**options), measure_adapters, json_path, plot)
