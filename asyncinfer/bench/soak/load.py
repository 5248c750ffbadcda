"""Thousands of streams over minutes or hours: every token compared with the right one, memory, lag
and pages sampled."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio

from asyncinfer import Engine, EngineConfig, EngineDead
from asyncinfer.bench.gates import Phase
from asyncinfer.bench.record import BenchError
from asyncinfer.bench.soak.checker import Cases, Counts, Reader
from asyncinfer.bench.soak.drained import pages_lost, places_lost
from asyncinfer.bench.soak.lateness import Lateness, watch_lateness
from asyncinfer.bench.soak.process import in_use_mib, kept_mib, rss_mib
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import FakeModel, FakeRunner, Step, Tokenizer

__all__ = ["LoadRun", "Sample", "measure_load"]

#: Samples of a run at most, and seconds between two at least.
SAMPLES = 360
LEAST_INTERVAL = 0.5
LONG_PROMPT = 1_000_000
#: Of ten consumers: those that leave in the middle, and those that read slowly.
LEAVERS, SLOW = (3, 6), (9,)
#: Tokens that a slow consumer's stream holds.
SLOW_BUFFER = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """At one moment; lag and long prompts since the sample before."""

    seconds: float
    #: MiB resident, taken from malloc, and given back to it but kept there; None where the system
    #: does not say.
    rss: float
    in_use: float | None
    kept: float | None
    #: Memory blocks that Python's own allocators have given out, large and small.
    python_blocks: int
    tokens: int
    running: int
    #: Streams that consumers have open.
    held: int
    pages_free: int
    lag_p99: float
    lag_max: float
    #: Whether a prompt of a megabyte was on its way, and how many were answered or left so far.
    long_prompt: bool
    long_prompts: int


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run."""

    streams: int
    seconds: float
    #: Tokens a second: asked for, and given.
    asked: float
    rate: float
    counts: Counts
    #: Errors that consumers met, by type: there is none to be met.
    errors: dict[str, int]
    samples: tuple[Sample, ...]
    #: Milliseconds, at the 99th percentile and at most: idle, with streams, with long prompts too.
    idle: dict[str, float]
    busy: dict[str, float]
    beside_long: dict[str, float]
    pages_total: int
    #: Pages that were not back once everybody had left.
    pages_lost: int
    #: Requests that could not be admitted after that, of as many as the engine holds.
    places_lost: int


async def measure_load(
    streams: int, rate: float, seconds: float, seed: int, report: Callable[[str], None]
) -> LoadRun:
    """Hold `streams` streams at `rate` tokens a second in all, for so long."""
    longest = max(16, min(400, int(rate * seconds / streams / 2)))
    pace = _Pace(rate)
    model = FakeModel(blocks=24 * streams + 1024, max_context=1024, strict=False, gate=pace)
    config = EngineConfig(
        max_running=streams, max_requests=streams, max_step_tokens=8192, drain_timeout=0.0
    )
    async with Engine(model, config=config) as engine:
        if not isinstance(model.runner, FakeRunner):
            raise BenchError("the model has no runner once it is open")
        cases = Cases(model.runner, seed, longest // 8, longest)
        load = _SoakLoad(engine, cases, streams, rate, seed)
        async with _long_engine() as long_engine:
            return await load.run(long_engine, seconds, report)


def _long_engine() -> Engine:
    """Prompts of a megabyte are another engine's, on the same event loop: with the vocabulary of a
    real model, so that tokenising them is work."""
    tokenizer = Tokenizer.from_folder(MODEL_PATH)
    context = LONG_PROMPT + 32
    model = FakeModel(
        blocks=context // 16 + 64, max_context=context, strict=False, tokenizer=tokenizer
    )
    return Engine(model, max_running=2, max_step_tokens=16_384, drain_timeout=0.0)


class _Pace:
    """A gate that lets a step's tokens go at a rate; a step that comes late is not made up for."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due = 0.0

    def __call__(self, phase: Phase, plan: Step) -> None:
        if phase == "collect":
            self._due = max(self._due + sum(plan.samples) / self._rate, time.perf_counter())
            time.sleep(max(0.0, self._due - time.perf_counter()))


@dataclass
class _SoakLoad:
    """The consumers and what they were given."""

    engine: Engine
    cases: Cases
    streams: int
    rate: float
    seed: int
    counts: Counts = field(default_factory=Counts)
    errors: Counter[str] = field(default_factory=Counter)
    #: Streams that consumers have open.
    open: int = 0
    long_prompts: int = 0
    long_under_way: bool = False
    ended: bool = False

    async def run(
        self, long_engine: Engine, seconds: float, report: Callable[[str], None]
    ) -> LoadRun:
        lateness = {name: Lateness() for name in ("idle", "busy", "beside_long")}
        interval = Lateness()
        phase = "idle"

        def current() -> Lateness:
            return interval

        samples: list[Sample] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_lateness, current)
            await anyio.sleep(min(10.0, seconds / 10))
            lateness["idle"].merge(interval)
            for index in range(self.streams):
                tasks.start_soon(self._consume, index)
            tasks.start_soon(self._send_long, long_engine)
            tasks.start_soon(self._renew)
            # The first steps are prompts only.
            await anyio.sleep(min(5.0, seconds / 10))
            began, first = time.monotonic(), self.counts.delivered
            step = max(LEAST_INTERVAL, seconds / SAMPLES)
            while (gone := time.monotonic() - began) < seconds and not self.ended:
                interval = Lateness()
                was_long = self.long_under_way
                await anyio.sleep(min(step, seconds - gone))
                phase = "beside_long" if was_long or self.long_under_way else "busy"
                lateness[phase].merge(interval)
                samples.append(self._sample(time.monotonic() - began, interval, phase))
                report(_progress(samples[-1], seconds))
            wall, tokens = time.monotonic() - began, self.counts.delivered - first
            self.ended = True
            tasks.cancel_scope.cancel()
        lost = await pages_lost(self.engine)
        return LoadRun(
            streams=self.streams,
            seconds=wall,
            asked=self.rate,
            rate=tokens / wall,
            counts=self.counts,
            errors=dict(self.errors),
            samples=tuple(samples),
            **{name: _quantiles(lags) for name, lags in lateness.items()},
            pages_total=self.engine.stats().blocks_total,
            pages_lost=lost,
            places_lost=await places_lost(self.engine, self.streams),
        )

    def _sample(self, seconds: float, lag: Lateness, phase: str) -> Sample:
        stats, in_use, kept = self.engine.stats(), in_use_mib(), kept_mib()
        return Sample(
            seconds=round(seconds, 3),
            rss=round(rss_mib(), 2),
            in_use=None if in_use is None else round(in_use, 2),
            kept=None if kept is None else round(kept, 2),
            python_blocks=sys.getallocatedblocks(),
            tokens=self.counts.delivered,
            running=stats.running,
            held=self.open,
            pages_free=stats.blocks_free + stats.blocks_cached,
            lag_p99=round(lag.quantile(0.99), 3),
            lag_max=round(lag.max, 3),
            long_prompt=phase == "beside_long",
            long_prompts=self.long_prompts,
        )

    async def _consume(self, index: int) -> None:
        """One request after the other."""
        choose = random.Random(f"{self.seed} {index}")
        kind = index % 10
        options: dict[str, Any] = {}
        if kind in SLOW:
            options = {"buffer": SLOW_BUFFER, "on_full": choose.choice(["pause", "coalesce"])}
        while not self.ended:
            case = self.cases.draw(choose)
            reader = Reader(case, self.counts)
            leave = choose.randrange(len(case.answer)) if kind in LEAVERS else None
            stream = self.engine.stream(case.prompt, params=case.params, **options)
            self.open += 1
            try:
                async with stream:
                    async for chunk in stream:
                        reader.take(chunk.token_ids)
                        if leave is not None and reader.held > leave:
                            break
                        if kind in SLOW:
                            await anyio.sleep(choose.random() * 0.5)
                reader.end(whole=leave is None)
                async for chunk in stream:
                    self.counts.late += len(chunk.token_ids)
            except Exception as error:
                # Whatever it is, it is counted, and the run goes on.
                self.errors[type(error).__name__] += 1
                self.ended = self.ended or isinstance(error, EngineDead)
                await anyio.sleep(0.1)
            finally:
                self.open -= 1

    async def _send_long(self, engine: Engine) -> None:
        """A prompt of a megabyte, then as long without one; every third is left while it is
        tokenised."""
        choose = random.Random(self.seed)
        words = [
            "".join(choose.choices("etaoinshrdlu", k=choose.randint(2, 9))) for _ in range(999)
        ]
        text = " ".join(choose.choices(words, k=LONG_PROMPT // 3))
        while not self.ended:
            began = time.monotonic()
            prompt = f"{self.long_prompts} {text}"[:LONG_PROMPT]
            patience = choose.random() if self.long_prompts % 3 == 2 else float("inf")
            self.long_under_way = True
            try:
                with anyio.move_on_after(patience):
                    await engine.generate(prompt, max_tokens=1, temperature=0.0)
            except Exception as error:
                self.errors[f"long prompt: {type(error).__name__}"] += 1
            self.long_prompts += 1
            # One that was left is tokenised to its end.
            while engine.stats().held_bytes:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            self.long_under_way = False
            await anyio.sleep(max(1.0, time.monotonic() - began))

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(0.1)
            self.cases.replace_one()


def _quantiles(lateness: Lateness) -> dict[str, float]:
    return {"p99": lateness.quantile(0.99), "max": lateness.max, "count": lateness.count}


def _progress(sample: Sample, seconds: float) -> str:
    done = min(1.0, sample.seconds / seconds)
    bar = "━" * round(20 * done) + " " * (20 - round(20 * done))
    at, of = (f"{int(s) // 60}:{int(s) % 60:02d}" for s in (sample.seconds, seconds))
    return f"soak {bar} {at} of {of}, {sample.tokens:,} tokens, {sample.rss:.0f} MiB"
