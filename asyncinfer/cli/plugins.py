"""`asyncinfer plugins`: which plugins are installed."""

from __future__ import annotations

import json as json_format

import click

from asyncinfer.plugins import registries

__all__ = ["plugins"]


@click.command()
@click.option("--json", is_flag=True, help="Print a JSON list.")
def plugins(json: bool) -> None:
    """List the plugins of every group: where each is from, what it does, and, if it cannot be
    used, why. Imports them all."""
    found = [(registry.group, info) for registry in registries() for info in registry.describe()]
    if json:
        click.echo(
            json_format.dumps(
                [
                    {
                        "group": group,
                        "name": info.name,
                        "origin": info.origin,
                        "summary": info.summary,
                        "problem": info.problem,
                    }
                    for group, info in found
                ],
                indent=2,
            )
        )
        return
    width = max(len(info.name) for _, info in found)
    shown = None
    for group, info in found:
        if group != shown:
            click.echo(("" if shown is None else "\n") + group)
            shown = group
        text = info.summary if info.problem is None else f"BROKEN: {info.problem}"
        click.echo(f"  {info.name:{width}}  {text}  [{info.origin}]")
