"""`asyncinfer bench cache`: cache policies on a trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from asyncinfer.bench import (
    BLOCKS,
    CacheOptions,
    Environment,
    Record,
    agents_trace,
    cache_tables,
    check_plot,
    environment_line,
    hybrid_table,
    measure_cache,
    read_trace,
)
from asyncinfer.cli.bench_options import FILE, recorded, several
from asyncinfer.cli.bench_run import write_record
from asyncinfer.cli.finite import FiniteRange
from asyncinfer.cli.plugin_choice import plugin_choice
from asyncinfer.plugins import cache_policies

__all__ = ["cache"]


@click.command(short_help="How much of a trace do cache policies find again?")
@click.argument("trace", type=FILE, required=False)
@click.option(
    "--agents",
    type=click.IntRange(0),
    metavar="SEED",
    help="In place of TRACE: agents that wait for tools, branch and end.",
)
@several(
    "--policy",
    "policies",
    what="A cache policy, NAME[:ARG=VALUE,...]",
    kind=plugin_choice(cache_policies, make=True),
    without="all that are installed",
)
@several(
    "--blocks",
    what="Blocks of the cache",
    kind=click.IntRange(1),
    without=", ".join(f"{blocks:,}" for blocks in BLOCKS),
)
@click.option(
    "--pinned-share",
    type=FiniteRange(0.0, 1.0),
    default=0.0,
    show_default=True,
    help="Of all blocks, how many open conversations may pin.",
)
@click.option(
    "--hybrid",
    metavar="MODEL",
    help="A model whose layers keep states, or its config.json: how much it finds again in the "
    "memory of so many blocks, with the least recently used given up.",
)
@several(
    "--state-interval",
    "intervals",
    what="Of the hybrid: keep the state after every so many blocks",
    kind=click.IntRange(1),
    without="1, 4, 16",
)
@click.option(
    "--growth", is_flag=True, help="Also what a policy costs by its blocks, to a million of them."
)
@recorded
def cache(
    trace: Path | None,
    agents: int | None,
    policies: tuple[tuple[str, dict[str, Any]], ...],
    blocks: tuple[int, ...],
    pinned_share: float,
    hybrid: str | None,
    intervals: tuple[int, ...],
    growth: bool,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """How much of TRACE cache policies find again, beside the best there can be.

    TRACE holds requests as JSON lines with `timestamp` (ms) and `hash_ids` (one per block of the
    prompt; equal ids are equal prefixes), as the Mooncake project publishes them; perhaps also with
    `conversation` (a number) and `then` (what it does after the answer: "live", "waiting" for a
    tool, or "over"). They are served one by one by the engine's own block manager; a block is a hit
    if the whole prefix before it is.
    """
    if (trace is None) == (agents is None):
        raise click.UsageError("give either TRACE or --agents")
    if plot is not None:
        check_plot(plot)
    environment = Environment.now()
    name = f"agents, seed {agents}" if trace is None else trace.name
    rows = agents_trace(agents or 0) if trace is None else read_trace(trace)
    if hybrid is not None:
        if agents is not None or policies or pinned_share or growth or json_path or plot:
            raise click.UsageError("--hybrid goes with TRACE, --blocks and --state-interval alone")
        # Imported here: it takes torch.
        from asyncinfer.planner import config_of, replay_hybrid

        prompts = [(row.time, row.ids) for row in rows]
        every = sorted(set(intervals)) or (1, 4, 16)
        found = replay_hybrid(prompts, config_of(hybrid), sorted(set(blocks)) or BLOCKS, every)
        Console().print(hybrid_table(found))
        return
    options = CacheOptions(
        policies=policies,
        blocks=sorted(set(blocks)) or BLOCKS,
        pinned_share=pinned_share,
        growth=growth,
    )
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("replay", total=1.0)

        def report(what: str, part: float) -> None:
            progress.update(task, description=what, completed=part)

        result = measure_cache(rows, options, report)
    console = Console()
    console.print(f"{name}: {result.requests:,} requests, {result.total:,} blocks")
    for table in cache_tables(result):
        console.print(table)
    console.print(environment_line(environment), highlight=False, markup=False, style="dim")
    record = Record(
        benchmark="cache",
        options={"trace": name, **dataclasses.asdict(options)},
        figures=result.figures(),
        detail=dataclasses.asdict(result),
        environment=environment,
    )
    write_record(record, json_path, plot)
