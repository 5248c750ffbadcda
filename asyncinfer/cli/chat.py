"""`asyncinfer chat`: a conversation in the terminal.

The engine lives on an event loop in another thread, and this thread reads lines. So Ctrl-C, which
arrives on the main thread, can end an answer without ending the engine.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any, Final

import click
from anyio.from_thread import BlockingPortal, start_blocking_portal

import asyncinfer
from asyncinfer.cli.app import one_line
from asyncinfer.cli.engine import adapter_of, check_sampling, open_engine
from asyncinfer.cli.model import with_model
from asyncinfer.cli.options import engine_options, sampling_options
from asyncinfer.cli.terminal import show

__all__ = ["chat", "show_answer"]

HELP: Final = """\
/clear, /reset      forget the conversation
/help, /?           this text
/bye, /exit, /quit  leave; so do exit and quit
Ctrl-C              stop the answer; leave, where nothing was typed yet
Ctrl-D              leave
A line that begins with a space is a message, whatever follows."""

_LEAVE: Final = frozenset({"/bye", "/exit", "/quit", "exit", "quit"})
_FORGET: Final = frozenset({"/clear", "/reset"})
_EXPLAIN: Final = frozenset({"/help", "/?"})

#: Sampling options of the embedded model where it replaces a model that cannot be fetched: it ends
#: no comment by itself, and repeats a word up to the end of its context.
_EMBEDDED: Final = {"max_tokens": 48, "repetition_penalty": 1.3}


@click.command()
@click.argument("message", required=False)
@click.option("--system", help="A message that tells the model how to behave.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.")
@sampling_options
@engine_options
def chat(
    message: str | None,
    system: str | None,
    max_tokens: int | None,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk with a model that has a chat template. With MESSAGE that is answered, and the program
    ends.

    Ctrl-C stops the answer, Ctrl-D or /bye ends the program; /help lists the commands.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    # A negative prompt as it was typed, before it becomes the messages of a conversation.
    check_sampling(sampling)
    sampling |= adapter_of(engine)
    first = [] if system is None else [{"role": "system", "content": system}]
    engine = with_model(engine)
    if "model" not in engine:
        sampling = {**_EMBEDDED, **sampling}
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(open_engine(engine)) as opened,
    ):
        conversation = _Conversation(portal, opened, first, sampling)
        if message is None:
            conversation.run()
        else:
            conversation.answer(message)


class _Conversation:
    """Reads lines and answers them, until the input ends."""

    def __init__(
        self,
        portal: BlockingPortal,
        engine: asyncinfer.Engine,
        first: list[dict[str, str]],
        sampling: dict[str, Any],
    ) -> None:
        self._portal = portal
        self._engine = engine
        self._first = first
        self._sampling = sampling
        self._messages = list(first)

    def run(self) -> None:
        if _terminal():
            with suppress(ImportError):
                # Line editing for input(); Windows has its own.
                import readline  # noqa: F401

            click.echo("Ctrl-C stops the answer, Ctrl-D or /bye ends, /help says more.")
        while (line := self._read()) is not None:
            # Stripped on the right only: a line that begins with a space is never a command.
            command = line.rstrip()
            if not command.strip():
                continue
            if command in _LEAVE:
                return
            if command in _FORGET:
                self._messages = list(self._first)
            elif command in _EXPLAIN:
                click.echo(HELP)
            elif command.startswith("/"):
                click.echo(f"Unknown command {command}; /help lists them.", err=True)
            else:
                self._turn(line)

    def _read(self) -> str | None:
        """The next line; None where the user leaves."""
        while True:
            try:
                return input("> " if _terminal() else "")
            except KeyboardInterrupt:
                # As in a shell, Ctrl-C drops what was typed.
                click.echo()
                if not _typed():
                    return None
            except EOFError:
                if _terminal():
                    click.echo()
                return None

    def answer(self, line: str) -> None:
        """Say `line` to the model, and show what it answers."""
        messages = [*self._messages, {"role": "user", "content": line}]
        answer = self._answer(messages)
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _turn(self, line: str) -> None:
        try:
            self.answer(line)
        except asyncinfer.EngineDead:
            raise
        except asyncinfer.AsyncInferError as error:
            # Neither question nor answer is kept, so the conversation can go on.
            click.echo(f"Error: {one_line(error)}", err=True)

    def _answer(self, messages: list[dict[str, str]]) -> str:
        sampling = dict(self._sampling)
        if "negative_prompt" in sampling:
            # The same conversation, with a model that was given the negative prompt.
            system = {"role": "system", "content": sampling["negative_prompt"]}
            spoken = [message for message in messages if message["role"] != "system"]
            sampling["negative_prompt"] = [system, *spoken]
        stream = self._engine.stream(messages, **sampling)
        future = self._portal.start_task_soon(show_answer, stream)
        try:
            return future.result()
        except KeyboardInterrupt:
            # `stop` keeps what was said as part of the conversation. Another Ctrl-C during the wait
            # ends the program.
            stream.stop()
            return future.result()


async def show_answer(stream: asyncinfer.Stream) -> str:
    """Show an answer as it comes. Returns its text, without the reasoning."""
    text, thinks = "", False
    async with stream:
        async for chunk in stream:
            # Reasoning is shown, but is no part of the conversation.
            show(chunk.reasoning)
            thinks = thinks or bool(chunk.reasoning)
            if thinks and chunk.text:
                show("\n\n")
                thinks = False
            show(chunk.text)
            text += chunk.text
    show("\n")
    return text


def _typed() -> str:
    """The text at the prompt, if line editing is loaded."""
    readline = sys.modules.get("readline")
    return "" if readline is None else str(readline.get_line_buffer())


def _terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
