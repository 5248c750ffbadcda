"""`asyncinfer bench quantized`: products by packed weights beside floats and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import QuantizedOptions, measure_quantized
from asyncinfer.cli.bench_options import count, quick, recorded
from asyncinfer.cli.bench_run import run_bench

__all__ = ["quantized"]


@click.command(short_help="How fast is a quantised file on this CPU, beside floats and llama.cpp?")
@click.option("-m", "--model", help="A GGUF file.  [default: smollm2]")
@count("--prompt", 32, "Tokens of a prompt.")
@count("--tokens", 64, "Tokens of an answer.")
@count("--prefill", 512, "Tokens of the prompt that prefill is measured with.")
@click.option("--threads", type=click.IntRange(1), help="Of every engine.  [default: torch's]")
@count("--repeat", 3, "How often each is measured, in turns; the fastest counts.")
@click.option("--no-peer", is_flag=True, help="Leave llama.cpp out.")
@quick
@recorded
def quantized(json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """A GGUF file on the CPU with its numbers packed, as floats, and in llama.cpp where
    llama-cpp-python is installed: one request, sixteen, 64, and prefill."""
    run_bench("quantized", QuantizedOptions(**options), measure_quantized, json_path, plot)
