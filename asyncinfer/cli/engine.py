"""Opening an engine for a command, with a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import click

import asyncinfer

__all__ = ["adapter_of", "check_sampling", "open_engine"]


@asynccontextmanager
async def open_engine(
    options: dict[str, Any],
) -> AsyncIterator[asyncinfer.Engine]:
    """An engine for the options of `engine_options`, with its adapter loaded. Bad options are a
    `click.UsageError`."""
    options = dict(options)
    adapter = options.pop("adapter", None)
    async with AsyncExitStack() as stack:
        with loading_bar() as report:
            try:
                engine = asyncinfer.Engine(progress=report, **options)
            except (TypeError, ValueError) as error:
                raise click.UsageError(str(error)) from error
            await stack.enter_async_context(engine)
        if adapter is not None:
            await engine.adapters.load(*adapter)
        yield engine


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raise `click.UsageError` for bad options of an answer, before a model is fetched for it. Some
    only the model can tell, such as a `regex` without a text that its tokens spell."""
    try:
        asyncinfer.SamplingParams(**sampling)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def adapter_of(engine: dict[str, Any]) -> dict[str, str]:
    """The option of a request by which it gets the adapter of `engine_options`, if there is one."""
    return {"adapter": engine["adapter"][0]} if "adapter" in engine else {}


@contextmanager
def loading_bar() -> Iterator[Callable[[asyncinfer.LoadProgress], None] | None]:
    """Show loaded bytes and compiled kernels on stderr inside the block; nothing without a
    terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task("loading", total=None)

        def report(step: asyncinfer.LoadProgress) -> None:
            kernels = f", {step.kernels_done} of {step.kernels_total} kernels compiled"
            bar.update(
                task,
                description=f"loading{kernels if step.kernels_total else ''}",
                completed=step.bytes_done,
                total=step.bytes_total,
            )

        yield report
