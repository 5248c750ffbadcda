"""`asyncinfer bench accuracy`: what smaller formats cost a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import AccuracyOptions, measure_accuracy
from asyncinfer.cli.bench_options import count, device, quick, recorded, several
from asyncinfer.cli.bench_run import run_bench

__all__ = ["accuracy"]


@click.command(short_help="What do smaller formats cost a model in perplexity?")
@click.option("-m", "--model", help="A checkpoint's folder.  [default: the shipped model]")
@several("--text", what="A file to read", without="what the shipped model was not trained on")
@count("--context", 2048, "Tokens of a sequence; longer files are read in pieces.", least=3)
@device
@several("--dtype", "dtypes", what='Such as "bfloat16"', default=("auto",))
@quick
@recorded
def accuracy(json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """What smaller formats of weights and KV cost a model: its perplexity on text, per token."""
    run_bench("accuracy", AccuracyOptions(**options), measure_accuracy, json_path, plot)
