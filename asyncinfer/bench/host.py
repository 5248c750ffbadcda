"""`asyncinfer bench host`: what the engine itself costs, on a runner that costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncinfer.bench.host_runner import RunnerCost, measure_runner
from asyncinfer.bench.host_scheduler import SchedulerCost, measure_scheduler
from asyncinfer.bench.host_streams import StreamLoad, measure_streams
from asyncinfer.bench.host_tokens import TokenCost, measure_tokens
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.record import Figure
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import Tokenizer

__all__ = ["HostOptions", "HostResult", "LoopResult", "measure_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The work. `scaled` is a smoke run of the same."""

    loops: Sequence[str]
    #: Requests that decode together.
    running: int = 256
    steps: int = 200
    #: Streams held at once, and what they get together.
    streams: int = 2000
    rate: float = 20_000.0
    seconds: float = 10.0
    #: Medians over so many repetitions.
    repeat: int = 3
    #: "shipped" draws from the shipped model's vocabulary, "bytes" from the 256 bytes, most of
    #: them no whole characters.
    tokenizer: str = "shipped"


@dataclass(frozen=True, slots=True)
class LoopResult:
    """On one kind of event loop."""

    loop: str
    tokens: TokenCost
    streams: StreamLoad


@dataclass(frozen=True, slots=True)
class HostResult:
    """The median repetition of each measurement, by its main figure."""

    scheduler: SchedulerCost
    runner: RunnerCost
    loops: tuple[LoopResult, ...]

    def figures(self) -> tuple[Figure, ...]:
        both, running = self.scheduler.both, self.scheduler.running
        found = [
            Figure(f"schedule + update, {running} running", both.mean / 1e3, "ms", "lower", 1.0),
            Figure(f"schedule + update, {running} running, p99", both.p99 / 1e3, "ms", "lower"),
            Figure(
                f"launch + collect, {running} rows, no device",
                self.runner.both.mean / 1e3,
                "ms",
                "lower",
            ),
        ]
        for result in self.loops:
            found += _figures(result)
        return tuple(found)


def _figures(result: LoopResult) -> list[Figure]:
    cost, load, on = result.tokens, result.streams, f"[{result.loop}]"
    consumers = f"{cost.running} consumers {on}"
    return [
        Figure(f"host CPU per token, {consumers}", cost.host, "us", "lower", 8.0),
        Figure(f"  the engine's threads {on}", cost.engine, "us", "lower"),
        Figure(f"  the event loop {on}", cost.loop, "us", "lower"),
        Figure(f"rate of {load.streams} streams {on}", load.rate, "tokens/s", "higher", load.goal),
        Figure(f"  CPU at that rate {on}", load.cpu, "cores", "lower"),
        Figure(f"  chunk latency p50 {on}", load.latency.p50, "ms", "lower"),
        Figure(f"  chunk latency p99 {on}", load.latency.p99, "ms", "lower"),
    ]


def measure_host(
    options: HostOptions, report: Callable[[str], None] = lambda _: None
) -> HostResult:
    """Run everything; `report` is told what is going on."""
    tokenizer = Tokenizer.from_folder(MODEL_PATH) if options.tokenizer == "shipped" else None
    report(f"schedule + update at {options.running} running")
    scheduler = [measure_scheduler(options.running, options.steps) for _ in range(options.repeat)]
    report(f"launch + collect of {options.running} rows on a device that takes no time")
    runner = [measure_runner(options.running, options.steps) for _ in range(options.repeat)]
    loops = []
    for loop in options.loops:
        report(f"CPU per token on {loop}")
        tokens = [
            run_on(loop, measure_tokens, options.running, options.steps, 20, tokenizer)
            for _ in range(options.repeat)
        ]
        report(f"{options.streams} streams on {loop}")
        streams = [
            run_on(loop, measure_streams, options.streams, options.rate, options.seconds, tokenizer)
            for _ in range(options.repeat)
        ]
        loops.append(
            LoopResult(
                loop,
                median(tokens, lambda its: its.host),
                median(streams, lambda its: its.rate),
            )
        )
    return HostResult(
        median(scheduler, lambda its: its.both.mean),
        median(runner, lambda its: its.both.mean),
        tuple(loops),
    )
