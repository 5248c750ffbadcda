"""docs/cli.md names every command and every option there is, and none that is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from asyncinfer.cli.app import asyncinfer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text("utf-8")


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, f"{path} {name} cannot be imported"
            yield from _commands(inner, f"{path} {name}")


COMMANDS = dict(_commands(asyncinfer, "asyncinfer"))


def test_every_command_is_documented() -> None:
    missing = [path for path in COMMANDS if path not in PAGE]
    assert not missing


def test_options_are_those_there_are() -> None:
    real = {
        option
        for command in COMMANDS.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help", "-h"}
    written = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", PAGE))
    assert written - real - {"-m"} == set()
    assert {option for option in real if option.startswith("--")} - written == set()


def test_every_option_has_a_help_text() -> None:
    bare = [
        f"{path} {parameter.opts[0]}"
        for path, command in COMMANDS.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert not bare
