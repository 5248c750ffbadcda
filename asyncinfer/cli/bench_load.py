"""`asyncinfer bench load`: how long a checkpoint takes to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer import bench as its
from asyncinfer.cli.bench_run import FILE, SMOKE, run_bench

__all__ = ["load"]


@click.command()
@click.option(
    "-m", "--model", help="A checkpoint's folder.  [default: random weights, made on the fly]"
)
@click.option(
    "--megabytes",
    type=click.IntRange(1),
    default=300,
    show_default=True,
    help="About so many of random weights.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="A torch device; auto takes CUDA where there is one.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto is bfloat16 on a GPU, float16 on a CPU, which is stored as it is used there.",
)
@click.option("--peer/--no-peer", default=True, help="Run transformers' from_pretrained too.")
@click.option("--quick", is_flag=True, help=SMOKE)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Repetitions; the median counts.",
)
@click.option("--json", "json_path", type=FILE, help="Write the record here.")
@click.option("--plot", type=FILE, help="Draw a plot, such as out.png (bench extra).")
def load(json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """How long a checkpoint takes to load, beside safetensors' load_file and transformers'
    from_pretrained.

    Each in a process of its own, in turns, with the files in the page cache; and the most host
    memory that each of them held meanwhile.
    """
    run_bench("load", its.LoadOptions(**options), its.measure_load, json_path, plot)
