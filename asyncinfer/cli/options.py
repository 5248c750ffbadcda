"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar, cast, get_args

import click

from asyncinfer import plugins
from asyncinfer.cli.plugin_choice import plugin_choice
from asyncinfer.config import KV, Attention, Kernels, KernelTrial, KernelTuning, Weights

__all__ = ["byte_size", "engine_options", "sampler_option", "sampling_options"]

Function = TypeVar("Function", bound=Callable[..., Any])

_PLUGIN: Final = "NAME[:ARG=VALUE,...]"
_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def byte_size(value: str) -> int:
    """A number of bytes, such as 500000, 512M or 2GiB (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(?:i?b)?", value.strip().lower())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a number of bytes such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def _named_path(value: str) -> tuple[str, str]:
    """`NAME=PATH` as a pair."""
    name, found, path = value.partition("=")
    if not (name and found and path):
        raise click.BadParameter(f"{value!r} is not NAME=PATH")
    return name, path


def engine_options(function: Function) -> Function:
    """Adds the options of an engine; the command gets them as `engine: dict`, `model` and `adapter`
    (a name and a path) included."""
    return _gathered(
        function,
        "engine",
        click.option(
            "-m",
            "--model",
            metavar="NAME|PATH|ID",
            help="A name that `asyncinfer models` lists, a checkpoint's folder, a GGUF file, or an "
            'id on the hub; "embedded" is the model that ships with the package.  '
            "[default: $ASYNCINFER_MODEL, or else smollm2]",
        ),
        click.option(
            "--adapter",
            type=_named_path,
            metavar="NAME=PATH|ID",
            help="Answer with this LoRA adapter: a folder that PEFT saved, or an id on the hub.",
        ),
        click.option("--revision", help="Branch, tag or commit of a hub id."),
        click.option(
            "--follow-symlinks",
            is_flag=True,
            default=None,
            help="Read files of a folder that are links to files elsewhere.",
        ),
        click.option("--device", help='Such as "cpu" or "cuda:1".  [default: a GPU, if any]'),
        click.option(
            "--dtype", help='Such as "bfloat16".  [default: the model\'s; float32 on a CPU]'
        ),
        click.option(
            "--kernels",
            type=click.Choice(get_args(Kernels)),
            help="What computes on a GPU.  [default: auto]",
        ),
        click.option(
            "--attention",
            type=click.Choice(get_args(Attention)),
            help="What attends on a GPU.  [default: auto]",
        ),
        click.option(
            "--kernel-trial",
            type=click.Choice(get_args(KernelTrial)),
            help="How a GPU's kernels are tried when the model is opened.  [default: cached]",
        ),
        click.option(
            "--kernel-tuning",
            type=click.Choice(get_args(KernelTuning)),
            help="Where a GPU's kernels have their tiles from.  [default: cached]",
        ),
        click.option(
            "--weights",
            type=click.Choice(get_args(Weights)),
            help="How the layers' matrices are held.  [default: plain]",
        ),
        click.option(
            "--kv",
            type=click.Choice(get_args(KV)),
            help="How keys and values are held.  [default: plain]",
        ),
        click.option(
            "--kv-bytes",
            type=byte_size,
            metavar="BYTES",
            help="Memory for KV, such as 2G.",
        ),
        click.option(
            "--weight-cache-bytes",
            type=byte_size,
            metavar="BYTES",
            help="Disk for copies of weights as a CPU lays them out, such as 20G: the next start "
            "maps one.  [default: none are kept]",
        ),
        click.option("--max-context", type=int, help="Longest prompt and answer, in tokens."),
        click.option(
            "--step-target",
            type=float,
            metavar="SECONDS",
            help="What a step should take while answers wait for a prompt in it.  "
            "[default: 0.1 on a CPU, none on a GPU]",
        ),
        click.option(
            "--cache-policy",
            type=plugin_choice(plugins.cache_policies, make=True),
            metavar=_PLUGIN,
            help="What the prefix cache gives up.  [default: lru]",
        ),
        click.option(
            "--scheduler",
            type=plugin_choice(plugins.schedulers, make=True),
            metavar=_PLUGIN,
            help="Who goes first.  [default: fcfs]",
        ),
        click.option(
            "--observer",
            "observers",
            # Not made here, since an observer may open a port when it is made.
            type=plugin_choice(plugins.observers, make=False),
            multiple=True,
            metavar=_PLUGIN,
            help="Is told of what happens. Repeatable.",
        ),
        click.option(
            "--proposer",
            "proposers",
            type=plugin_choice(plugins.proposers, make=True),
            multiple=True,
            metavar=_PLUGIN,
            help="Guesses tokens, which are computed together. Repeatable.",
        ),
        click.option(
            "--draft",
            metavar="PATH|ID",
            help="A small model of the same vocabulary that guesses tokens, likewise; "
            '"embedded" is the one that ships with the package, and "mtp" the layer of the model '
            "that predicts further tokens.",
        ),
    )


def sampler_option(function: Function) -> Function:
    """`--sampler`, as often as there are samplers, in their order."""
    return click.option(
        "--sampler",
        type=plugin_choice(plugins.samplers, make=True),
        multiple=True,
        metavar=_PLUGIN,
        help="Sample by a plugin; several are called in order. Repeatable.",
    )(function)


def _contents(context: click.Context, parameter: click.Parameter, file: Any) -> str | None:
    """The text of a file."""
    if file is None:
        return None
    try:
        text: str = file.read()
    except (OSError, UnicodeError) as error:
        raise click.BadParameter(f"{file.name}: {error}", context, parameter) from error
    return text


def sampling_options(function: Function) -> Function:
    """Adds the options of an answer; the command gets those that were given as
    `sampling: dict`."""
    return _gathered(
        function,
        "sampling",
        click.option("-t", "--temperature", type=float, help="0 takes the likeliest token."),
        click.option("--top-p", type=float, help="Draw from this share of the probability."),
        click.option("--top-k", type=int, help="Draw from the k likeliest tokens."),
        click.option("--min-p", type=float, help="Drop tokens less likely than this, relatively."),
        click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition."),
        click.option("--seed", type=int, help="The same seed gives the same answer."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT. Repeatable."),
        click.option(
            "--stop-regex", multiple=True, metavar="REGEX", help="End before a match. Repeatable."
        ),
        click.option(
            "--guidance-scale",
            type=float,
            help="How far to be guided away from the negative prompt; 1 is off.",
        ),
        click.option(
            "--negative-prompt",
            metavar="TEXT",
            help="What to be guided away from; in a chat, TEXT as its system message.",
        ),
        click.option("--thinking-budget", type=int, help="Most tokens of the reasoning."),
        sampler_option,
        click.option(
            "--json-schema",
            type=click.File(encoding="utf-8"),
            callback=_contents,
            help="Answer with JSON that the JSON Schema in a file allows.",
        ),
        click.option(
            "--json-object", is_flag=True, default=None, help="Answer with a JSON object."
        ),
        click.option("--regex", help="Answer with a match of a regular expression."),
        click.option(
            "--grammar",
            type=click.File(encoding="utf-8"),
            callback=_contents,
            help="Answer with a sentence of the grammar in a file, in Lark's syntax or in GBNF.",
        ),
        click.option(
            "--choice", multiple=True, metavar="TEXT", help="Answer with this TEXT. Repeatable."
        ),
        click.option(
            "--constrain-after", metavar="TEXT", help="The answer must fit only after TEXT."
        ),
    )


def _gathered(function: Function, name: str, *options: Callable[[Any], Any]) -> Function:
    """`function` with `options` added, their values handed over as one dict, without those that
    were not given."""
    probe = click.command()(_apply(options, lambda: None))
    names = [parameter.name for parameter in probe.params]

    @wraps(function)
    def gather(**values: Any) -> Any:
        given = {key: values.pop(key) for key in names if key in values}
        kept = {key: value for key, value in given.items() if value not in (None, ())}
        return function(**values, **{name: kept})

    return cast("Function", _apply(options, gather))


def _apply(options: tuple[Callable[[Any], Any], ...], function: Any) -> Any:
    for option in reversed(options):
        function = option(function)
    return function
