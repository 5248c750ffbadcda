"""`asyncinfer pull`: fetch a model ahead of its use."""

from __future__ import annotations

import sys

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
    if model in NAMED_MODELS and revision is None:
        path = pull(NAMED_MODELS[model], show_progress=show)
    else:
        path = resolve(model, revision=revision, show_progress=show, check=check_fetched)
    click.echo(path)
