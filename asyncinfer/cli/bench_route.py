"""`asyncinfer bench route`: a trace on replicas, by where requests are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import RouteOptions, agents_trace, measure_route, read_trace
from asyncinfer.cli.bench_options import FILE, count, number, recorded
from asyncinfer.cli.bench_run import run_bench

__all__ = ["route"]


@click.command(short_help="What do replicas make of a trace, by where requests are sent?")
@click.argument("trace", type=FILE, required=False)
@click.option(
    "--agents",
    type=click.IntRange(0),
    metavar="SEED",
    help="In place of TRACE: agents that wait for tools, branch and end.",
)
@count("--replicas", 2, "Replicas.")
@count("--blocks", 3_000, "Blocks of each replica's cache.")
@number("--block-seconds", 0.05, "What a block of a prompt takes to compute.", 0.0)
@number("--answer-seconds", 1.0, "What an answer takes, beside others.", 0.0)
@number("--speed", 20.0, "How many times as fast as in the trace requests come.", 0.001)
@recorded
def route(
    trace: Path | None, agents: int | None, json_path: Path | None, plot: Path | None, **given: Any
) -> None:
    """Hit rate, throughput and time to the first token of TRACE on one replica, and on several by
    each routing, in virtual time: by prefix and load, by load alone, and in turns.

    TRACE is as for `asyncinfer bench cache`. A replica computes prompts one after the other, in the
    order in which they come. It has the engine's own prefix cache, and tells the router what comes
    and goes there.
    """
    if (trace is None) == (agents is None):
        raise click.UsageError("give either TRACE or --agents")
    name = f"agents, seed {agents}" if trace is None else trace.name
    rows = agents_trace(agents or 0) if trace is None else read_trace(trace)
    options = RouteOptions(trace=name, **given)
    run_bench("route", options, lambda chosen, _: measure_route(rows, chosen), json_path, plot)
