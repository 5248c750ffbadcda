"""`asyncinfer pull`: fetch a model ahead of its use."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from asyncinfer.cli.start import raise_again

__all__ = ["pull_model"]


@click.command("pull")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
def pull_model(model: str, revision: str | None) -> None:
    """Fetch MODEL, a name that `asyncinfer models` lists or a hub id, and print where it lies.

    \b
    asyncinfer pull smollm2
    asyncinfer pull org/name
    asyncinfer pull org/name:file.gguf

    Files that have come whole are not fetched again, also where a download was cut short.
    """
    # Imports torch: the help text needs none.
    from asyncinfer.models import NAMED_MODELS, check_fetched, pull, resolve

    raise_again()
    show = sys.stderr.isatty()
    with _ending_in_order():
        if model in NAMED_MODELS and revision is None:
            path = pull(NAMED_MODELS[model], show_progress=show)
        else:
            path = resolve(model, revision=revision, show_progress=show, check=check_fetched)
    click.echo(path)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Within, SIGTERM raises `SystemExit`, so that what has come of a file is removed, as after
    Ctrl-C; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
