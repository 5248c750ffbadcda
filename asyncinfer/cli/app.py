"""The command `asyncinfer`: its commands, its exit codes, one line per error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final, NoReturn

import click

from asyncinfer.cli.torch_later import torch_later
from asyncinfer.errors import AsyncInferError

__all__ = ["INTERRUPTED", "asyncinfer", "one_line", "run"]

#: Exit code of a program that was interrupted: 128 + SIGINT.
INTERRUPTED: Final = 130

#: name -> (module:attribute, help). Imported when used: a help text needs no engine.
COMMANDS: Final = {
    "generate": ("asyncinfer.cli.generate:generate", "Complete a prompt."),
    "chat": ("asyncinfer.cli.chat:chat", "Talk with a model."),
    "serve": ("asyncinfer.cli.serve:serve", "Serve a model over HTTP, and a chat page."),
    "models": ("asyncinfer.cli.models:models", "List the models that can be fetched and loaded."),
    "pull": ("asyncinfer.cli.pull:pull_model", "Fetch a model ahead of its use."),
    "plan": ("asyncinfer.cli.plan:plan", "Plan a model on a GPU: memory, floors, limits."),
    "doctor": (
        "asyncinfer.cli.doctor:doctor",
        "Look at this machine, and try what the engine computes with.",
    ),
    "plugins": ("asyncinfer.cli.plugins:plugins", "List the plugins that are installed."),
    "simulate": (
        "asyncinfer.cli.simulate:simulate_command",
        "Live random lives of an engine, and check everything.",
    ),
    "bench": ("asyncinfer.cli.bench:bench", "Measure the engine on this machine."),
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name == "models":
            # This command reads headers and computes nothing.
            torch_later()
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="asyncinfer", message="%(prog)s %(version)s")
def asyncinfer() -> None:
    """The LLM engine that Python programs await, from the command line.

    \b
    asyncinfer chat "What is the capital of France?"   a small model, fetched the first time
    asyncinfer chat --model path-or-hub-id             a checkpoint of your own
    """


def run(args: Sequence[str] | None) -> NoReturn:
    """Run a command line and exit, as `asyncinfer.cli.main` does."""
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The parent process closed this stream.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if sys.stdout is None:
        # Every command writes its result there, so without it there is no use in running one.
        click.echo("Error: stdout is closed, there is nowhere to write to", err=True)
        sys.exit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal cannot show must not lose the rest.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    try:
        code = asyncinfer.main(args, prog_name="asyncinfer", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`).
        _drop_output()
        return 1
    except (AsyncInferError, OSError) as error:
        click.echo(f"Error: {one_line(error)}", err=True)
        if isinstance(error, OSError):
            # The output itself may be what failed, such as on a full disk.
            _drop_output()
        return 1
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Send output to nowhere, since Python flushes stdout once more when it exits."""
    with suppress(OSError):  # no file at all, in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(error: BaseException) -> str:
    """The messages of an error and of its cause, without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    cause = error.__cause__
    behind = "" if cause is None else " ".join(str(cause).split())
    if cause is None or behind in text:
        return text
    return f"{text} (caused by {type(cause).__name__}: {behind})"
