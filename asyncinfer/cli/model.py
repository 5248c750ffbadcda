"""Which model a command takes, and fetching it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from asyncinfer.cli.app import one_line
from asyncinfer.cli.start import raise_again
from asyncinfer.errors import ModelLoadError

if TYPE_CHECKING:
    from asyncinfer.models import NamedModel

__all__ = ["shipped", "with_model"]

#: What a command takes without `--model`.
DEFAULT: Final = "smollm2"


def with_model(engine: dict[str, Any]) -> dict[str, Any]:
    """The options of an engine, with the model to open. A named model is fetched if it has not
    been.

    Without `--model` the environment variable `ASYNCINFER_MODEL` names the model, else it is
    "smollm2". If that cannot be fetched it is the embedded model, and a line on stderr says so.
    """
    # Imports torch: help texts need none.
    from asyncinfer.models import NAMED_MODELS

    raise_again()
    options = dict(engine)
    given = options.pop("model", os.environ.get("ASYNCINFER_MODEL") or None)
    name = DEFAULT if given is None else given
    here = os.path.exists(name)
    if name in NAMED_MODELS and not (given and here):
        try:
            path = _fetch(NAMED_MODELS[name])
        except ModelLoadError as error:
            if given:
                raise
            click.echo(
                f"{one_line(error)}. Taking the embedded model instead: it completes Python code,"
                " and is no assistant.",
                err=True,
            )
            return options
        if here:
            # Nobody asked for what is called so in the working directory.
            return {**options, "model": str(path)}
    return {**options, "model": name}


def shipped(model: str) -> str:
    """Where the config of a model is that is read and not opened: the package's folder for
    "embedded", else `model` itself."""
    from asyncinfer.builtin import EMBEDDED, MODEL_PATH

    return str(MODEL_PATH) if model == EMBEDDED else model


def _fetch(model: NamedModel) -> Path:
    from asyncinfer.models import pull, pulled

    path = pulled(model)
    if path is None:
        size = f"{model.size / 1e6:.0f} MB"
        click.echo(f"Fetching {model.name} ({size}, {model.licence}) ...", err=True)
        path = pull(model, show_progress=sys.stderr.isatty())
    return path
