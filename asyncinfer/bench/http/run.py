"""`measure_http` runs all parts of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncinfer.bench.http.calls import CallCost, measure_calls, one_core
from asyncinfer.bench.http.options import HttpOptions
from asyncinfer.bench.http.streams import StreamsRun, measure_http_streams
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.record import BenchError, Figure

__all__ = ["HttpResult", "measure_http"]


@dataclass(frozen=True, slots=True)
class HttpResult:
    """The repetition whose added lag is the median, and the calls."""

    streams: StreamsRun
    #: Calls in process, on one core and on all cores.
    calls: tuple[CallCost, ...]
    spread: tuple[CallCost, ...]

    def figures(self) -> tuple[Figure, ...]:
        run, who = self.streams, f"{self.streams.seen.open} HTTP streams, half left"
        found = [
            Figure(f"added lag p99, {who}", run.added_p99, "ms", "lower", 10.0),
            Figure("  lag p99, no client", run.idle.p99, "ms", "lower"),
            Figure("  lag max", run.busy.max, "ms", "lower"),
            Figure("  CPU of the loop's thread per event", run.event_cpu, "us", "lower"),
            Figure("  events", run.seen.events / run.seen.seconds, "1/s", "higher"),
            Figure("  pages, requests, tasks, descriptors kept", run.kept, "", "lower", 0.0),
            Figure("  until all are back", run.back, "s", "lower", 1.0),
        ]
        for cost, spread in zip(self.calls, self.spread, strict=True):
            kind = "streamed" if cost.streamed else "whole"
            found += [
                Figure(f"in-process call, {kind}: our own CPU", cost.ours, "us", "lower", 300.0),
                Figure("  the same on all cores", spread.ours, "us", "lower"),
                Figure("  OpenAI's client alone", cost.alone, "us", "lower"),
                Figure("  both, beyond the engine's call", cost.added, "us", "lower"),
                Figure("  the engine's call", cost.engine, "us", "lower"),
            ]
        return tuple(found)


def measure_http(
    options: HttpOptions, report: Callable[[str], None] = lambda _: None
) -> HttpResult:
    """Run all measurements; `report` is called with the current one. Raises `BenchError`."""
    if options.loop == "trio":
        raise BenchError("uvicorn runs on asyncio and uvloop")
    runs = []
    for repetition in range(options.repeat):
        report(f"{options.streams} HTTP streams ({repetition + 1} of {options.repeat})")
        runs.append(run_on(options.loop, measure_http_streams, options))
    report("in-process calls")
    try:
        with one_core():
            calls = run_on(options.loop, measure_calls, options.calls)
        spread = run_on(options.loop, measure_calls, options.calls)
    except ModuleNotFoundError as error:
        raise BenchError(str(error)) from error
    return HttpResult(median(runs, lambda run: run.added_p99), calls, spread)
