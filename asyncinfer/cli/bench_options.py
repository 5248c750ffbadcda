"""The options that commands of `asyncinfer bench` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from asyncinfer.bench import LOOPS, RANDOM, SHIPPED
from asyncinfer.cli.finite import FiniteRange
from asyncinfer.cli.new_file import NewFile

__all__ = [
    "FILE",
    "count",
    "device",
    "dtype",
    "loop",
    "model",
    "number",
    "quick",
    "recorded",
    "repeat",
    "several",
]

Function = TypeVar("Function", bound=Callable[..., Any])

FILE: Final = click.Path(dir_okay=False, path_type=Path)


def count(flag: str, default: int, what: str, least: int = 1) -> Callable[[Function], Function]:
    """An option that takes a whole number."""
    kind = click.IntRange(least)
    return click.option(flag, type=kind, default=default, show_default=True, help=what)


def number(flag: str, default: float, what: str, least: float) -> Callable[[Function], Function]:
    """An option that takes a real number."""
    kind = FiniteRange(least)
    return click.option(flag, type=kind, default=default, show_default=True, help=what)


def several(
    *names: str, what: str, kind: Any = None, default: Sequence[Any] = (), without: str = ""
) -> Callable[[Function], Function]:
    """An option that may be given several times; `without` says what is taken where it is not given
    and has no `default`."""
    note = f"  [default: {without}]" if without else ""
    return click.option(
        *names,
        multiple=True,
        type=click.Choice(kind) if isinstance(kind, tuple) else kind,
        default=default,
        show_default=bool(default),
        help=f"{what}; several may be given.{note}",
    )


def repeat(default: int = 3) -> Callable[[Function], Function]:
    return count("--repeat", default, "Repetitions; the median counts.")


def model(function: Function) -> Function:
    what = f"{SHIPPED!r}, {RANDOM!r} (random weights, made on the fly), a folder or a hub id."
    return click.option("-m", "--model", default=RANDOM, show_default=True, help=what)(function)


def dtype(function: Function) -> Function:
    return click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        default="float32",
        show_default=True,
        help="Of weights, activations and KV.",
    )(function)


def loop(function: Function, loops: Sequence[str] = LOOPS) -> Function:
    kind = click.Choice(loops)
    return click.option(
        "--backend", "loop", type=kind, default="asyncio", show_default=True, help="Event loop."
    )(function)


def device(function: Function) -> Function:
    what = "A torch device; auto takes CUDA where there is one."
    return click.option("--device", default="auto", show_default=True, help=what)(function)


def quick(function: Function) -> Function:
    what = "A smoke run of seconds; its figures mean nothing."
    return click.option("--quick", is_flag=True, help=what)(function)


def recorded(function: Function) -> Function:
    """Adds the options `--json` and `--plot`."""
    plot = click.option("--plot", type=FILE, help="Draw a plot, such as out.png (bench extra).")
    json = click.option("--json", "json_path", type=NewFile(), help="Write the record here.")
    return json(plot(function))
