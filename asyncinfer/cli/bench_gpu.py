"""`asyncinfer bench decode`, `prefill`, `kernels` and `h200`: the model's own work on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from asyncinfer import bench as its
from asyncinfer.cli.bench_run import FILE, SMOKE, print_record, run_bench

__all__ = ["decode", "h200", "kernels", "prefill"]

Function = TypeVar("Function", bound=Callable[..., Any])


def device_options(function: Function) -> Function:
    """The options that all of them have."""
    for option in (
        click.option("--plot", type=FILE, help="Draw a plot, such as out.png (bench extra)."),
        click.option("--json", "json_path", type=FILE, help="Write the record here."),
        click.option("--quick", is_flag=True, help=SMOKE),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            help="A torch device; auto takes CUDA where there is one.",
        ),
    ):
        function = option(function)
    return function


def shape_option(function: Function) -> Function:
    decorate = click.option(
        "--shape",
        "shapes",
        multiple=True,
        type=click.Choice(its.FULL_SHAPES),
        help="Shape of the model; several may be given.  [default: all; a smoke run on a CPU]",
    )
    return decorate(function)


def numbers_option(
    flag: str, default: Sequence[int], help_text: str
) -> Callable[[Function], Function]:
    return click.option(
        flag,
        multiple=True,
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help=f"{help_text}; several may be given.",
    )


def floor_options(function: Function) -> Function:
    for flag, what in (
        ("--bandwidth", "Bytes a second of the floors.  [default: of a copy, measured]"),
        ("--flops", "Operations a second of the floors.  [default: of a product, measured]"),
    ):
        function = click.option(flag, type=click.FloatRange(1), help=what)(function)
    return function


@click.command()
@shape_option
@numbers_option("--batch", (1, 64), "Sequences in a step")
@numbers_option("--context", (512, 2048, 8192), "Tokens behind each")
@click.option(
    "--steps", type=click.IntRange(2), default=40, show_default=True, help="Steps measured."
)
@floor_options
@device_options
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
    chosen = its.StepOptions(shapes=shapes, batches=batch, contexts=context, **options)
    run_bench("decode", chosen, its.measure_decode, json_path, plot)


@click.command()
@shape_option
@numbers_option("--tokens", (2048, 8192), "Tokens of the prompt")
@click.option(
    "--max-step-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Tokens of a step at most.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Repetitions; the median counts.",
)
@floor_options
@device_options
def prefill(
    shapes: tuple[str, ...],
    tokens: tuple[int, ...],
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Milliseconds until a prompt's first token on random weights, beside the floor."""
    chosen = its.StepOptions(shapes=shapes, batches=(1,), contexts=tokens, **options)
    run_bench("prefill", chosen, its.measure_prefill, json_path, plot)


@click.command()
@shape_option
@numbers_option("--batch", (1, 64), "Sequences in the step")
@click.option(
    "--context", type=click.IntRange(1), default=2048, show_default=True, help="Tokens behind each."
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Repetitions; the median counts.",
)
@device_options
def kernels(
    shapes: tuple[str, ...],
    batch: tuple[int, ...],
    json_path: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Every kernel against float64, and its time beside its own floor."""
    chosen = its.KernelOptions(shapes=shapes, batches=batch, **options)
    run_bench("kernels", chosen, its.measure_kernels, json_path, plot)


@click.command()
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(list(its.PARTS)),
    help="Some of the parts only; several may be given.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Of the whole run, at most.",
)
@device_options
def h200(parts: tuple[str, ...], json_path: Path | None, plot: Path | None, **options: Any) -> None:
    """All of a GPU within ten minutes, each target with a pass or a shortfall.

    Ceilings, kernels, decode and prefill against their floors, what the host and the engine cost
    one another, and 256 requests at once beside the peers that are installed. The record is written
    after every part: a run that is cut short keeps what it has. A CPU gets a smoke run.
    """
    if plot is not None:
        its.check_plot(plot)
    chosen = its.GpuOptions(parts=parts or tuple(its.PARTS), **options)
    load = its.Environment.now().load

    def record(result: its.GpuResult) -> its.Record:
        return its.Record(
            benchmark="h200",
            options=dataclasses.asdict(chosen),
            figures=result.figures(),
            detail=result.detail(),
            environment=dataclasses.replace(its.Environment.now(), load=load),
        )

    def save(result: its.GpuResult) -> None:
        if json_path is not None:
            record(result).save(json_path)

    with Console(stderr=True).status("asyncinfer bench h200") as status:
        result = its.measure_gpu(chosen, status.update, save)
    done = record(result)
    print_record(done)
    if plot is not None:
        its.save_plot(done, plot)
    failed = [part.name for part in result.parts if part.error is not None]
    if failed:
        raise its.BenchError(f"parts without figures: {', '.join(failed)}; the record says why")
