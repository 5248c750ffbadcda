"""Running an `asyncinfer bench`, and writing its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncinfer.bench import (
    Environment,
    Record,
    check_plot,
    environment_line,
    record_tables,
    save_plot,
)

__all__ = ["print_record", "run_bench", "write_record"]


def run_bench(
    name: str,
    options: Any,
    measure: Callable[[Any, Callable[[str], None]], Any],
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Measure, print, and write what was asked for."""
    if plot is not None:
        check_plot(plot, name)
    load = Environment.now().load
    console = Console(stderr=True)
    with console.status(f"asyncinfer bench {name}") as status:
        # Without a terminal, print lines of a log in place of a status.
        result = measure(options, status.update if console.is_terminal else console.out)
    # Versions are those of what the run imported; the machine's load is that from before it.
    environment = dataclasses.replace(Environment.now(), load=load)
    record = Record(
        benchmark=name,
        options=dataclasses.asdict(options),
        figures=result.figures(),
        detail=dataclasses.asdict(result),
        environment=environment,
    )
    print_record(record)
    write_record(record, json_path, plot)


def write_record(record: Record, json_path: Path | None, plot: Path | None) -> None:
    """Write the JSON file and the plot that were asked for."""
    if json_path is not None:
        record.save(json_path)
    if plot is not None:
        save_plot(record, plot)


def print_record(record: Record) -> None:
    console = Console()
    for table in record_tables(record):
        console.print(table)
    line = environment_line(record.environment)
    console.print(line, highlight=False, markup=False, style="dim")
