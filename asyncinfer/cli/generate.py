"""`asyncinfer generate`: complete one prompt."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import anyio
import click

import asyncinfer
from asyncinfer.cli.engine import adapter_of, check_sampling, open_engine
from asyncinfer.cli.model import with_model
from asyncinfer.cli.options import engine_options, sampling_options
from asyncinfer.cli.terminal import json_text, show

__all__ = ["generate"]


@click.command()
@click.argument("prompt")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="At most.")
@sampling_options
@click.option(
    "-n", "--n", "answers", type=int, default=1, show_default=True, help="Independent answers."
)
@click.option(
    "--echo/--no-echo", default=None, help="Show the prompt too.  [default: on a terminal]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@engine_options
def generate(
    prompt: str,
    max_tokens: int,
    answers: int,
    echo: bool | None,
    as_json: bool,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Complete PROMPT and stream the text to stdout. "-" reads the prompt from stdin.

    \b
    asyncinfer generate "def add(a, b):"
    asyncinfer generate -m meta-llama/Llama-3.2-1B -t 0.7 --stop $'\\n\\n' - < prompt.txt
    """
    text = _stdin() if prompt == "-" else _argument(prompt)
    sampling |= {"max_tokens": max_tokens, "n": answers}
    check_sampling(sampling)
    sampling |= adapter_of(engine)
    engine = with_model(engine)
    if echo is None:
        echo = sys.stdout.isatty()
    if as_json:
        anyio.run(_as_json, text, engine, sampling)
    elif answers == 1:
        anyio.run(_streamed, text, engine, sampling, echo)
    else:
        anyio.run(_one_by_one, text, engine, sampling, echo)


async def _streamed(
    prompt: str, engine: dict[str, Any], sampling: dict[str, Any], echo: bool
) -> None:
    async with open_engine(engine) as opened, opened.stream(prompt, **sampling) as stream:
        if echo:
            show(prompt)
        async for chunk in stream:
            show(chunk.text)
        show("\n")
        _summary(await stream)


async def _one_by_one(
    prompt: str, engine: dict[str, Any], sampling: dict[str, Any], echo: bool
) -> None:
    async with open_engine(engine) as opened:
        done = await opened.generate(prompt, **sampling)
        for choice in done.choices:
            show(f"--- {choice.index + 1} of {len(done.choices)}\n")
            show((prompt if echo else "") + choice.text + "\n")
        _summary(done)


async def _as_json(prompt: str, engine: dict[str, Any], sampling: dict[str, Any]) -> None:
    async with open_engine(engine) as opened:
        done = await opened.generate(prompt, **sampling)
    answer = {"prompt": prompt, "text": done.text, **dataclasses.asdict(done)}
    for choice in answer["choices"]:
        # `reader` is a function of the text, not data.
        del choice["reader"]
    click.echo(json_text(answer, sys.stdout, indent=2))


def _summary(done: asyncinfer.Completion) -> None:
    """One line about speed, for a person at a terminal."""
    if not sys.stderr.isatty():
        return
    speed = f", {1 / done.timings.per_token:.0f} tokens/s" if done.timings.per_token else ""
    line = f"{done.usage.completion_tokens} tokens{speed}, {done.finish_reason}"
    # https://no-color.org
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    click.echo(click.style(line, dim=not plain, reset=not plain), err=True)


def _argument(text: str) -> str:
    """A command-line argument as text. Bytes that the locale does not decode are read as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError as error:
            raise click.UsageError(f"PROMPT is not UTF-8: {error}") from error
    return text


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8: {error}") from error
