"""`asyncinfer bench decode`, `prefill`, `kernels` and `h200`: the model's own work on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from rich.console import Console

from asyncinfer.bench import BenchError, Environment, Record, check_plot, save_plot
from asyncinfer.cli.bench_options import count, device, number, quick, recorded, repeat, several
from asyncinfer.cli.bench_run import print_record, run_bench
from asyncinfer.config import KV, Weights
from benchmarks.decode import StepOptions, measure_decode, measure_prefill
from benchmarks.h200 import PARTS, GpuOptions, GpuResult, measure_gpu
from benchmarks.kernels import KernelOptions, measure_kernels
from benchmarks.shapes import FULL_SHAPES

__all__ = ["decode", "h200", "kernels", "prefill"]

Function = TypeVar("Function", bound=Callable[..., Any])


def shapes(function: Function) -> Function:
    return several(
        "--shape",
        "shapes",
        what="Shape of the model",
        kind=FULL_SHAPES,
        without="all; a smoke run on a CPU",
    )(function)


def floors(function: Function) -> Function:
    kind = click.FloatRange(1)
    what = "a second of the floors.  [default: of a"
    bandwidth = click.option("--bandwidth", type=kind, help=f"Bytes {what} copy, measured]")
    flops = click.option("--flops", type=kind, help=f"Operations {what} product, measured]")
    return bandwidth(flops(function))


def formats(function: Function) -> Function:
    weights = click.option(
        "--weights",
        type=click.Choice(get_args(Weights)),
        default="plain",
        show_default=True,
        help="How the layers' matrices are held.",
    )
    kv = click.option(
        "--kv",
        type=click.Choice(get_args(KV)),
        default="plain",
        show_default=True,
        help="How keys and values are held.",
    )
    return weights(kv(function))


@click.command(short_help="How long are decode steps, beside their floor?")
@shapes
@several("--batch", what="Sequences in a step", kind=click.IntRange(1), default=(1, 64))
@several("--context", what="Tokens behind each", kind=click.IntRange(1), default=(512, 2048, 8192))
@count("--steps", 40, "Steps measured.", least=2)
@floors
@formats
@device
@quick
@recorded
def decode(
    shapes: tuple[str, ...],
    batch: tuple[int, ...],
    context: tuple[int, ...],
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Milliseconds of a decode step on random weights, beside its floor.

    The floor is what reading the weights and the KV cache takes, or the arithmetic. Steps are the
    engine's own, sampling included, one launched while another runs.
    """
    chosen = StepOptions(shapes=shapes, batches=batch, contexts=context, **options)
    run_bench("decode", chosen, measure_decode, json_path, plot)


@click.command(short_help="How long do prompts take, beside their floor?")
@shapes
@several("--tokens", what="Tokens of the prompt", kind=click.IntRange(1), default=(2048, 8192))
@count("--max-step-tokens", 2048, "Tokens of a step at most.")
@repeat()
@floors
@formats
@device
@quick
@recorded
def prefill(
    shapes: tuple[str, ...],
    tokens: tuple[int, ...],
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Milliseconds until a prompt's first token on random weights, beside the floor."""
    chosen = StepOptions(shapes=shapes, batches=(1,), contexts=tokens, **options)
    run_bench("prefill", chosen, measure_prefill, json_path, plot)


@click.command(short_help="Is every kernel right, and how near to its floor?")
@shapes
@several("--batch", what="Sequences in the step", kind=click.IntRange(1), default=(1, 64))
@count("--context", 2048, "Tokens behind each.")
@repeat(15)
@click.option("--tune", is_flag=True, help="Time the candidates of tiles and splits on a GPU, too.")
@device
@quick
@recorded
def kernels(
    shapes: tuple[str, ...],
    batch: tuple[int, ...],
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Every kernel against float64, and its time beside its own floor."""
    chosen = KernelOptions(shapes=shapes, batches=batch, **options)
    run_bench("kernels", chosen, measure_kernels, json_path, plot)


@click.command(short_help="All of a GPU in ten minutes, with targets and peers.")
@several("--part", "parts", what="Some of the parts only", kind=tuple(PARTS))
@number("--seconds", 600.0, "Of the whole run, at most.", least=1)
@device
@quick
@recorded
def h200(parts: tuple[str, ...], json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """All of a GPU within ten minutes, each target with a pass or a shortfall.

    Ceilings, kernels, decode and prefill against their floors, what the host and the engine cost
    one another, and 256 requests at once beside the peers that are installed. The record is written
    after every part: a run that is cut short keeps what it has. A CPU gets a smoke run.
    """
    if plot is not None:
        check_plot(plot)
    chosen = GpuOptions(parts=parts or tuple(PARTS), **options)
    load = Environment.now().load

    def record(result: GpuResult) -> Record:
        return Record(
            benchmark="h200",
            options=dataclasses.asdict(chosen),
            figures=result.figures(),
            detail=result.detail(),
            environment=dataclasses.replace(Environment.now(), load=load),
        )

    def save(result: GpuResult) -> None:
        if json_path is not None:
            record(result).save(json_path)

    with Console(stderr=True).status("asyncinfer bench h200") as status:
        result = measure_gpu(chosen, status.update, save)
    done = record(result)
    print_record(done)
    if plot is not None:
        save_plot(done, plot)
    failed = [part.name for part in result.parts if part.error is not None]
    if failed:
        raise BenchError(f"parts without figures: {', '.join(failed)}; the record says why")
