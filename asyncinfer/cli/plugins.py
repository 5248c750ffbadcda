"""`asyncinfer plugins`: which plugins are installed."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from contextlib import redirect_stdout

import click

from asyncinfer.plugins import ignored, registries

__all__ = ["plugins"]


@click.command()
@click.option("--json", is_flag=True, help="Print a JSON list.")
def plugins(json: bool) -> None:
    """List the plugins of every group: where each is from, what it does, and, if it cannot be
    used, why. Imports them all, but for those that are blocked."""
    # A plugin may print while it is imported, which must not mix with the list.
    with redirect_stdout(sys.stderr):
        found = [info for registry in registries() for info in registry.describe()]
    found += [info for info in ignored() if info not in found]
    # The sort is stable: an ignored plugin comes after the one that has its name.
    found.sort(key=lambda info: (info.group, info.name))
    if json:
        click.echo(json_format.dumps([dataclasses.asdict(info) for info in found], indent=2))
        return
    width = max(len(info.name) for info in found)
    shown = None
    for info in found:
        if info.group != shown:
            click.echo(("" if shown is None else "\n") + info.group)
            shown = info.group
        text = info.summary if info.problem is None else f"NOT USABLE: {info.problem}"
        click.echo(f"  {info.name:{width}}  {text}  [{info.origin}]")
