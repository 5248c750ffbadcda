"""Thousands of streams held at once at a given rate: what is reached, what it takes, how late
chunks arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from asyncinfer import Engine, EngineConfig, SamplingParams
from asyncinfer.bench.gates import Phase, StartingLine
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
from asyncinfer.testing import FakeModel, Step, Tokenizer

__all__ = ["StreamLoad", "measure_streams"]

PROMPT = 8


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """`streams` streams, all of them decoding, over `seconds`."""

    streams: int
    seconds: float
    tokens: int
    #: Tokens a second: asked for, and held by the consumers.
    asked: float
    rate: float
    #: CPU time over wall time: 1.0 is one core.
    cpu: float
    #: Milliseconds from the end of a step until a consumer holds the chunk.
    latency: Quantiles

    @property
    def goal(self) -> float:
        """99 % of the rate asked for: the window's first and last step count in part."""
        return 0.99 * self.asked


async def measure_streams(
    streams: int = 2000,
    rate: float = 20_000.0,
    seconds: float = 10.0,
    tokenizer: Tokenizer | None = None,
) -> StreamLoad:
    """Each stream gets `rate / streams` tokens a second; a step computes all of them."""
    each = max(2, round(rate * seconds / streams))
    answer = each + 4
    meter = _Meter(streams, rate, each)
    blocks = streams * ((PROMPT + answer) // 16 + 2)
    model = FakeModel(blocks=blocks, strict=False, gate=meter, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)

    async def consume(index: int) -> None:
        held = 0
        async with engine.stream(_prompt(index), params=params) as stream:
            meter.line.enter()
            async for chunk in stream:
                meter.hold(index, held, len(chunk.token_ids))
                held += len(chunk.token_ids)
        if held != answer:
            raise BenchError(f"stream {index} gave {held} of {answer} tokens")

    config = EngineConfig(
        max_running=streams, max_requests=streams, max_step_tokens=2 * PROMPT * streams
    )
    async with Engine(model, config=config) as engine:
        meter.running = lambda: engine.stats().running
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(streams):
                    tasks.start_soon(consume, index)
        finally:
            meter.line.open()
    return meter.load()


class _Meter:
    """A gate that holds tokens to a rate, and notes when each stream's tokens were let go."""

    def __init__(self, streams: int, rate: float, each: int) -> None:
        self.line = StartingLine(streams)
        self.running: Callable[[], int] = lambda: 0
        self._streams = streams
        self._rate = rate
        self._wanted = streams * each
        self._due = 0.0
        self._stream_of: dict[int, int] = {}
        self._made: list[list[float]] = [[] for _ in range(streams)]
        self._late: list[float] = []
        self._begun = 0
        self._held = 0
        self._began: tuple[float, float] | None = None
        self._ended: tuple[float, float] | None = None

    def __call__(self, phase: Phase, plan: Step) -> None:
        if phase == "launch":
            self.line.wait()
            for join in plan.joins:
                self._stream_of[join.slot] = _index(join.token_ids)
            return
        # Time lost by a late step is not made up, so that the rate never exceeds the one asked for.
        self._due = max(self._due + sum(plan.samples) / self._rate, time.perf_counter())
        time.sleep(max(0.0, self._due - time.perf_counter()))
        now = time.perf_counter()
        for slot, samples in zip(plan.slots, plan.samples, strict=True):
            if samples:
                self._made[self._stream_of[slot]].append(now)

    def hold(self, index: int, position: int, tokens: int) -> None:
        """A consumer has the tokens from `position` on of its answer (event loop's thread)."""
        if self._ended is not None:
            return
        now = time.perf_counter()
        if self._began is not None:
            self._held += tokens
            made = self._made[index][position : position + tokens]
            self._late += [(now - then) * 1e3 for then in made]
            if self._held >= self._wanted:
                self._ended = now, time.process_time()
        elif not position:
            self._begun += 1
            if self._begun == self._streams:
                if self.running() != self._streams:
                    raise BenchError(f"{self.running()} of {self._streams} streams are running")
                self._began = now, time.process_time()

    def load(self) -> StreamLoad:
        if self._began is None or self._ended is None:
            raise BenchError(f"consumers held {self._held} of {self._wanted} tokens")
        wall = self._ended[0] - self._began[0]
        return StreamLoad(
            streams=self._streams,
            seconds=wall,
            tokens=self._held,
            asked=self._rate,
            rate=self._held / wall,
            cpu=(self._ended[1] - self._began[1]) / wall,
            latency=Quantiles.of(self._late),
        )


def _prompt(index: int) -> list[int]:
    """`PROMPT` tokens that spell the index."""
    return [1 + (index >> (7 * place)) % 128 for place in range(3)] + [7] * (PROMPT - 3)


def _index(token_ids: Sequence[int]) -> int:
    return sum((token - 1) << (7 * place) for place, token in enumerate(token_ids[:3]))
