"""`asyncinfer bench host`: what the engine itself costs, on a runner that costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncinfer.bench.checkout import from_checkout
from asyncinfer.bench.host_streams import StreamLoad, measure_streams
from asyncinfer.bench.host_tokens import TokenCost, measure_tokens
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import Tokenizer

__all__ = ["HostOptions", "HostResult", "LoopResult", "StepCost", "measure_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of the benchmark."""

    loops: Sequence[str]
    #: Requests that decode together.
    running: int = 256
    steps: int = 200
    #: Streams held at once, and the tokens a second that they get together.
    streams: int = 2000
    rate: float = 20_000.0
    seconds: float = 10.0
    #: Medians over so many repetitions.
    repeat: int = 3
    #: "shipped" draws from the shipped model's vocabulary, "bytes" from the 256 bytes, most of
    #: them no whole characters.
    tokenizer: str = "shipped"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of CPU (the thread's own time) per decode step: of the scheduler's two calls,
    `schedule` and `update`, or of the runner's, `launch` and `collect`."""

    running: int
    steps: int
    tokens: int
    first: Quantiles
    second: Quantiles
    #: The sum of the two calls, step by step.
    both: Quantiles


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Figures on one kind of event loop."""

    loop: str
    tokens: TokenCost
    streams: StreamLoad


@dataclass(frozen=True, slots=True)
class HostResult:
    """The median repetition of each measurement, by its main figure."""

    loops: tuple[LoopResult, ...]
    #: None outside a checkout: they are steps of the engine's internals.
    scheduler: StepCost | None = None
    runner: StepCost | None = None
    #: Measurements that were left out -> why.
    not_measured: Mapping[str, str] = field(default_factory=dict)

    def figures(self) -> tuple[Figure, ...]:
        found = []
        if self.scheduler is not None:
            both, name = self.scheduler.both, f"schedule + update, {self.scheduler.running} running"
            found.append(Figure(name, both.mean / 1e3, "ms", "lower", 1.0))
            found.append(Figure(f"{name}, p99", both.p99 / 1e3, "ms", "lower"))
        if self.runner is not None:
            name = f"launch + collect, {self.runner.running} rows, no device"
            found.append(Figure(name, self.runner.both.mean / 1e3, "ms", "lower"))
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
    scheduler = runner = None
    not_measured = {}
    try:
        steps = from_checkout("host_steps")
    except BenchError as error:
        not_measured["schedule + update, launch + collect"] = str(error)
    else:
        report(f"schedule + update at {options.running} running")
        scheduler = _median_cost(steps.measure_scheduler, options)
        report(f"launch + collect of {options.running} rows on a device that takes no time")
        runner = _median_cost(steps.measure_runner, options)
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
                median(tokens, lambda cost: cost.host),
                median(streams, lambda load: load.rate),
            )
        )
    return HostResult(tuple(loops), scheduler, runner, not_measured)


def _median_cost(measure: Callable[[int, int], StepCost], options: HostOptions) -> StepCost:
    runs = [measure(options.running, options.steps) for _ in range(options.repeat)]
    return median(runs, lambda cost: cost.both.mean)
