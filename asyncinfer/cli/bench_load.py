"""`asyncinfer bench load`: how long a checkpoint takes to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import LoadOptions, measure_load
from asyncinfer.cli.bench_options import count, device, quick, recorded, repeat
from asyncinfer.cli.bench_run import run_bench

__all__ = ["load"]


@click.command(short_help="How long does a checkpoint take to load?")
@click.option(
    "-m",
    "--model",
    help="A checkpoint's folder or a GGUF file.  [default: random weights, made on the fly]",
)
@count("--megabytes", 1500, "About so many of random weights.")
@click.option(
    "--layout",
    type=click.Choice(["plain", "gguf", "fp8", "gptq", "awq", "compressed-tensors"]),
    default="plain",
    show_default=True,
    help="How random weights are stored. gguf is Q4_K_M; all but fp8 have 4 bits.",
)
@device
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto is bfloat16 on a GPU, float16 on a CPU, which is stored as it is used there.",
)
@click.option("--peer/--no-peer", default=True, help="Run transformers' from_pretrained too.")
@quick
@repeat()
@recorded
def load(json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """How long a checkpoint takes to load, beside safetensors' load_file and transformers'
    from_pretrained.

    Of a GGUF file or a quantised checkpoint: how long an engine takes to open, beside reading the
    files' bytes into memory.

    Each in a process of its own, in turns, with the files in the page cache; and the most host
    memory that each of them held meanwhile.
    """
    run_bench("load", LoadOptions(**options), measure_load, json_path, plot)
