"""`asyncinfer plan`: what a model takes on a GPU, and how fast it can be there."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from asyncinfer.bench import check_plot
from asyncinfer.cli.model import shipped
from asyncinfer.cli.plan_plot import save_plan_plot
from asyncinfer.errors import InvalidRequest
from asyncinfer.planner import FormatPlan, Plan, gpus
from asyncinfer.planner import plan as make_plan

__all__ = ["plan"]


@click.command()
@click.argument("model")
@click.option(
    "--gpu",
    default="h200",
    show_default=True,
    help=f"One of {', '.join(gpus())}.",
)
@click.option("--context", type=int, help="Tokens of each sequence.  [default: 4096, if it can]")
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences in a step.")
@click.option("--dtype", default="auto", help='Such as "bfloat16".  [default: the model\'s]')
@click.option("--nominal", is_flag=True, help="The maker's figures, even where some are measured.")
@click.option("--adapters", type=int, default=0, show_default=True, help="LoRA adapters at once.")
@click.option("--adapter-rank", type=int, help="Their largest rank.  [default: the engine's]")
@click.option("--draft", metavar="PATH|ID", help='A draft model or head beside it, or "mtp".')
@click.option(
    "--state-interval",
    type=int,
    default=1,
    show_default=True,
    help="Blocks between states that are kept for prefix hits.",
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--offline", is_flag=True, help="Take what the hub's cache holds.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw a plot, such as out.png (bench extra).",
)
@click.option("--json", is_flag=True, help="Print JSON.")
def plan(model: str, plot_path: Path | None, json: bool, **options: Any) -> None:
    """What MODEL takes on a GPU and how fast it can be there.

    MODEL is a folder, a config.json, a hub id or "embedded", of which only the config is read; or a
    GGUF file, or a name or org/name:file.gguf that has been pulled, of which only the header is
    read. Floors are what the hardware allows; what to expect is what good engines make of it.
    """
    if plot_path is not None:
        check_plot(plot_path)
    if options["draft"] is not None:
        options["draft"] = shipped(options["draft"])
    try:
        found = make_plan(shipped(model), **options)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    if json:
        click.echo(json_format.dumps(dataclasses.asdict(found), indent=2))
    else:
        _print(found)
    if plot_path is not None:
        save_plan_plot(found, plot_path)


def _print(found: Plan) -> None:
    gpu, first = found.gpu, found.formats[0]
    measured = ", measured" if found.bandwidth != gpu.bandwidth else ""
    for line in (
        f"{found.architecture}: {_short(found.parameters)} parameters, "
        f"{_short(found.active_parameters)} of them at work on a token",
        f"{gpu.title}: {gpu.memory / 1e9:.0f} GB, {found.bandwidth / 1e12:.4g} TB/s, "
        f"{found.flops / 1e12:.4g} TFLOP/s{measured}",
        f"context {found.context:,}: {first.kv_bytes_per_token:,} bytes of KV per token"
        f"{_beyond(first)}, "
        f"{first.kv_bytes_per_sequence / 1e9:.3g} GB per sequence",
        f"batch {found.batch:,}: {_limit(found)}",
        *_states(found),
        *([f"adapters: {found.adapter_bytes / 1e6:.4g} MB"] if found.adapter_bytes else []),
        *([f"draft model or head: {found.draft_bytes / 1e9:.3g} GB"] if found.draft_bytes else []),
        *(
            f"stored as {one.name}: {one.tensors:,} tensors, {_short(one.numbers)} numbers, "
            f"{one.bytes / 1e6:.4g} MB"
            for one in found.stored
        ),
    ):
        click.echo(line)
    table = Table(box=None, pad_edge=False)
    table.add_column("format", no_wrap=True)
    for title in (
        "weights GB",
        "KV B/token",
        "fit",
        "decode floor ms",
        "expect tok/s",
        "if full",
        "prefill floor ms",
        "expect tok/s",
        "limit",
    ):
        table.add_column(title, justify="right")
    for row in found.formats:
        table.add_row(
            row.format,
            f"{row.weight_bytes / 1e9:.2f}",
            f"{row.kv_bytes_per_token:,}",
            f"{row.sequences:,}",
            f"{1e3 * row.decode_floor:.3g}",
            f"{row.decode_tokens_per_second:,.0f}",
            f"{row.most_tokens_per_second:,.0f}",
            f"{1e3 * row.prefill_floor:.3g}",
            f"{row.prefill_tokens_per_second:,.0f}",
            row.limit,
        )
    click.echo()
    # A pipe has no width to fit.
    Console(width=None if sys.stdout.isatty() else 144).print(table)


def _states(found: Plan) -> list[str]:
    """The states that a hybrid keeps for prefix hits."""
    kept = found.formats[0].state_bytes_kept
    return [f"states kept for prefix hits: {kept / 1e9:.3g} GB per sequence"] if kept else []


def _beyond(row: FormatPlan) -> str:
    """The bytes of one more token, where full windows make it fewer than before."""
    if row.kv_bytes_per_further_token == row.kv_bytes_per_token:
        return ""
    return f" ({row.kv_bytes_per_further_token:,} of one more)"


def _limit(found: Plan) -> str:
    first = found.formats[0]
    if first.limit == "capacity":
        if not first.sequences:
            return "capacity limits it, the memory holds the weights and not one sequence"
        return f"capacity limits it, {first.sequences:,} such sequences fit"
    if first.limit == "compute":
        return "arithmetic limits a decode step"
    return "memory bandwidth limits a decode step"


def _short(count: int) -> str:
    """A number such as 8.03 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
