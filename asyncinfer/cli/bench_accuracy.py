"""`asyncinfer bench accuracy`: what smaller formats cost and save."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from asyncinfer.bench import SHIPPED, AccuracyOptions, measure_accuracy
from asyncinfer.cli.bench_options import count, device, quick, recorded, several
from asyncinfer.cli.bench_run import run_bench
from asyncinfer.config import KV, Weights

__all__ = ["accuracy"]


@click.command(short_help="What do smaller formats cost a model, and what do they save?")
@several(
    "-m",
    "--model",
    "models",
    what=f"{SHIPPED!r}, a folder, a GGUF file, a name or a hub id",
    default=(SHIPPED,),
)
@several(
    "--weights",
    what="How weights are held",
    kind=get_args(Weights),
    without="all for the first model, plain for others",
)
@several("--kv", what="How keys and values are held", kind=get_args(KV), without="as --weights")
@several("--text", what="A file to read", without="what the shipped model was not trained on")
@count("--context", 2048, "Tokens of a sequence; longer files are read in pieces.", least=4)
@click.option("--tokens", type=click.IntRange(2), help="Most tokens to read.  [default: all]")
@device
@several("--dtype", "dtypes", what='Such as "bfloat16"', default=("auto",))
@quick
@recorded
def accuracy(json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """What smaller formats of weights and KV cost a model, its perplexity on text per token, and
    what they save: bytes of weights, and the speed of one request.

    Every pair of --weights and --kv is measured for every --model, and held against the first.
    """
    run_bench("accuracy", AccuracyOptions(**options), measure_accuracy, json_path, plot)
