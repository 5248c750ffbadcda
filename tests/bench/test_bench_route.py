"""`asyncinfer bench route`: replicas in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncinfer.bench import (
    BenchError,
    CacheOptions,
    Record,
    RouteOptions,
    agents_trace,
    measure_cache,
    measure_route,
)
from asyncinfer.cli.app import asyncinfer

SLICE = Path(__file__).resolve().parent / "data" / "conversation_slice.jsonl"
#: Some 800 requests.
ROWS = agents_trace(3, beginnings=60)


def test_two_replicas_and_what_prefixes_are_worth() -> None:
    """Two give 1.8 times the throughput of one at least, and find more by prefix than in turns."""
    result = measure_route(ROWS, RouteOptions(blocks=1_000))
    runs = {run.routing: run for run in result.several}
    prefix, turns = runs["prefix"], runs["round-robin"]
    assert result.one.seconds / prefix.seconds >= 1.8
    assert prefix.rate > runs["load"].rate > turns.rate
    assert prefix.rate >= result.one.rate
    assert prefix.ttft < turns.ttft
    for run in runs.values():
        assert sum(run.requests) == len(ROWS)
        assert max(run.requests) < 0.6 * len(ROWS)
    figures = {figure.name: figure for figure in result.figures()}
    assert figures["throughput in that of one, 2 replicas, prefix"].target == 1.8


def test_one_replica_finds_what_its_cache_holds() -> None:
    """Nothing is lost on the way: requests come in the trace's order to the engine's own cache."""
    one = measure_route(ROWS, RouteOptions(replicas=1, blocks=1_000)).one
    plain = measure_cache(ROWS, CacheOptions(policies=["lru"], blocks=[1_000], block_size=1))
    assert one.hits == plain.replays[0].hits
    computed = one.total - one.hits
    assert one.seconds >= computed * RouteOptions().block_seconds


def test_the_command_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "route.json"
    words = f"bench route {SLICE} --replicas 3 --json {path}"
    done = CliRunner().invoke(asyncinfer, words.split())
    assert done.exit_code == 0, done.output
    record = Record.load(path)
    assert record.options["trace"] == SLICE.name
    assert {run["replicas"] for run in record.detail["several"]} == {3}
    both = CliRunner().invoke(asyncinfer, ["bench", "route"])
    assert both.exit_code == 2
    assert "either TRACE or --agents" in both.output


def test_a_request_that_fits_no_cache_is_refused() -> None:
    with pytest.raises(BenchError, match="more than 5"):
        measure_route(ROWS, RouteOptions(blocks=5))
