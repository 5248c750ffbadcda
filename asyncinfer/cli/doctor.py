"""`asyncinfer doctor`: what the engine finds on this machine."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from asyncinfer.cli.model import shipped
from asyncinfer.cli.new_file import NewFile
from asyncinfer.cli.start import raise_again
from asyncinfer.doctor import Report, examine_machine

__all__ = ["doctor"]

_GIB = 1 << 30


@click.command()
@click.option(
    "-m",
    "--model",
    metavar="PATH|ID|NAME",
    help="Time products at its shapes; only its config is read.  [default: a Llama of 1.2 B]",
)
@click.option("--threads", type=click.IntRange(1), help="Of products.  [default: torch's]")
@click.option(
    "--tune",
    is_flag=True,
    help="Measure what each GPU's kernels are fastest with, for engines that open from now on.",
)
@click.option(
    "--json",
    "json_path",
    type=NewFile(dash=True),
    help="Write the report as JSON, such as doctor.json; - is standard output.",
)
@click.pass_context
def doctor(
    context: click.Context,
    model: str | None,
    threads: int | None,
    tune: bool,
    json_path: Path | None,
) -> None:
    """What the engine finds on this machine: processor, memory, libraries; whether what it computes
    with is right; and how fast weights of each kind are multiplied.

    The exit code is 1 where the engine does without something that this machine should have.
    """
    raise_again()
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("looking")
        report = examine_machine(
            None if model is None else shipped(model),
            threads=threads,
            tune=tune,
            told=lambda what: bar.update(task, description=what),
        )
    if json_path is not None:
        told = _json(dataclasses.asdict(report))
        text = json_format.dumps(told, indent=1, allow_nan=False) + "\n"
        if str(json_path) == "-":
            click.echo(text, nl=False)
        else:
            _write(json_path, text)
    if json_path is None or str(json_path) != "-":
        _print(report)
    if report.fallbacks:
        context.exit(1)


def _json(value: Any) -> Any:
    """`value` in JSON's types, with null for NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from error


def _print(report: Report) -> None:
    # A pipe has no width, so tables have a fixed one.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    tuned = [_tuned(report)] if report.tuned else []
    for table in (_machine(report), _trials(report), *tuned, _products(report)):
        console.print(table)
        console.print()
    alone, many = report.best(1), report.best(16)
    console.print(
        f"For one request weights are best held as {alone.held}, for sixteen as {many.held}. "
        "Attention, norms and draws come on top: `asyncinfer bench serve` measures whole engines."
    )
    machine = report.machine
    if machine.load is not None and machine.load > machine.free_cores / 2:
        console.print(
            f"Other programs wanted {machine.load:g} cores: on its own the machine is faster."
        )
    for trial in report.fallbacks:
        console.print(f"{trial.verdict.capitalize()}: {trial.name}. Instead: {trial.instead}.")


def _machine(report: Report) -> Table:
    machine = report.machine
    quota = "" if machine.quota is None else f", a quota of {machine.quota:g} cores' time"
    fast = "" if machine.fast_cores is None else f", {machine.fast_cores} of them fast ones"
    load = "" if machine.load is None else f", load {machine.load:g}"
    rows = {
        "processor": f"{machine.processor} ({machine.architecture})",
        "cores": f"{machine.usable_cores} of {machine.cores}{fast}{quota}{load}",
        "instructions": " ".join(machine.instructions) or "none that products gain by",
        "memory": "not known"
        if machine.memory is None or machine.available_memory is None
        else f"{machine.available_memory / _GIB:.1f} of {machine.memory / _GIB:.1f} GiB free, "
        f"read at {report.bandwidth / 1e9:.1f} GB/s, threads: {report.threads}",
        "GPUs": "; ".join(machine.gpus) or "none",
        "driver": machine.driver or "none",
        "C compiler": machine.compiler or "none",
        "libraries": ", ".join(
            f"{name} {version or 'missing'}" for name, version in machine.libraries.items()
        ),
        "Python": f"{machine.python}, {machine.platform}",
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _trials(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("trial")
    table.add_column("verdict")
    titles = ["error", "allowed"]
    # Only a GPU's kernels are timed.
    timed = any(trial.seconds is not None for trial in report.trials)
    for title in [*titles, "µs", "of bandwidth"] if timed else titles:
        table.add_column(title, justify="right")
    for trial in report.trials:
        cells = ["" if value is None else f"{value:.1e}" for value in (trial.error, trial.allowed)]
        if trial.seconds and trial.floor:
            cells += [f"{trial.seconds * 1e6:.1f}", f"{trial.floor / trial.seconds:.0%}"]
        table.add_row(trial.name, trial.verdict, *cells)
    return table


def _tuned(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("kernel", "GPU", "fastest with"):
        table.add_column(title)
    table.add_column("µs", justify="right")
    table.add_column("times as fast", justify="right")
    for each in report.tuned:
        best = "what was derived" if each.derived else each.best
        cells = f"{each.seconds[each.best] * 1e6:.1f}", f"{each.gain:.2f}"
        table.add_row(each.kernel, each.device, best, *cells)
    return table


def _products(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = f"tokens a second, by products alone, of {report.model}"
    table.add_column("weights")
    table.add_column("GB", justify="right")
    for rows in report.products[0].seconds:
        table.add_column(f"{rows} at once", justify="right")
    table.add_column("of bandwidth", justify="right")
    for each in report.products:
        speeds = (f"{each.tokens_per_second(rows):,.1f}" for rows in each.seconds)
        share = f"{each.bandwidth / report.bandwidth:.0%}"
        table.add_row(each.held, f"{each.bytes / 1e9:.2f}", *speeds, share)
    return table
