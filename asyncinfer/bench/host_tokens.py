"""What a token costs on the host, on every thread, until its consumer holds the chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from asyncinfer import Engine, EngineConfig, SamplingParams
from asyncinfer.bench.gates import PATIENCE, Phase, StartingLine
from asyncinfer.bench.record import BenchError
from asyncinfer.plugins import Chosen
from asyncinfer.protocols import Observer
from asyncinfer.testing import ClockedModel, FakeModel, Step, Tokenizer

__all__ = ["TokenCost", "measure_tokens", "staggered_prompt"]


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Microseconds of CPU per token."""

    running: int
    steps: int
    tokens: int
    #: Everything the process did, the runner's work taken off: the fake model's, and the gate's.
    host: float
    #: The parts of `host` on the engine's threads, and on the event loop's.
    engine: float
    loop: float
    #: The runner's work.
    runner: float


async def measure_tokens(
    running: int = 256,
    steps: int = 200,
    warmup: int = 20,
    tokenizer: Tokenizer | None = None,
    observers: Sequence[Chosen[Observer]] = (),
) -> TokenCost:
    """Decode `running` streams in lock-step: each consumer holds its chunk before the next one is
    made, as behind a real device, whose step outlasts the host's work. So every token pays for a
    wake-up of its own.
    """
    # Four more, since streams that were submitted first are a step or two ahead.
    answer = warmup + steps + 4
    gate = _LockStep(running, warmup, steps)
    blocks = running * ((48 + answer) // 16 + 2)
    model = ClockedModel(FakeModel(blocks=blocks, strict=False, gate=gate, tokenizer=tokenizer))
    gate.clock = lambda: model.seconds
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)

    async def consume(index: int) -> None:
        async with engine.stream(staggered_prompt(index), params=params) as stream:
            gate.line.enter()
            async for chunk in stream:
                gate.hold(len(chunk.token_ids))

    config = EngineConfig(
        max_running=running,
        max_requests=running,
        max_step_tokens=64 * running,
        observers=observers,
    )
    async with Engine(model, config=config) as engine:
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(running):
                    tasks.start_soon(consume, index)
        finally:
            gate.open()
    return gate.cost()


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters at the moment when every chunk made so far is held."""

    held: int
    process: float
    thread: float
    runner: float


class _LockStep:
    """A gate that lets a step's tokens go when all earlier ones are held, and takes the marks."""

    def __init__(self, running: int, warmup: int, steps: int) -> None:
        self._running = running
        self._warmup = warmup
        self._steps = steps
        self.line = StartingLine(running)
        #: CPU seconds of the runner so far.
        self.clock: Callable[[], float] = lambda: 0.0
        self._made = 0
        self._held = 0
        self._caught_up = threading.Event()
        self._opened = False
        self._full_steps = 0
        self._first: _Mark | None = None
        self._last: _Mark | None = None

    def hold(self, tokens: int) -> None:
        """A consumer has a chunk (event loop's thread)."""
        self._held += tokens
        if self._held >= self._made:
            self._caught_up.set()

    def open(self) -> None:
        """Let all steps go: the consumers have left, and the engine closes."""
        self._opened = True
        self.line.open()
        self._caught_up.set()

    def __call__(self, phase: Phase, plan: Step) -> None:
        if phase == "launch":
            self.line.wait()
            return
        self._wait()
        if len(plan.slots) == plan.tokens == self._running:
            if self._full_steps == self._warmup:
                self._first = self._mark()
            elif self._full_steps == self._warmup + self._steps:
                self._last = self._mark()
            self._full_steps += 1
        self._made += sum(plan.samples)

    def _wait(self) -> None:
        # The consumer counts before it compares, and this thread clears before it compares. So
        # whichever compares second sees the other's change. The same holds of `open`.
        self._caught_up.clear()
        if self._opened or self._held >= self._made:
            return
        if not self._caught_up.wait(PATIENCE):
            raise BenchError(f"consumers hold {self._held} of {self._made} tokens")

    def _mark(self) -> _Mark:
        return _Mark(self._held, time.process_time(), time.thread_time(), self.clock())

    def cost(self) -> TokenCost:
        first, last = self._first, self._last
        if first is None or last is None:
            raise BenchError(f"only {self._full_steps} steps had all {self._running} requests")
        tokens = last.held - first.held
        if tokens != self._running * self._steps:
            raise BenchError(f"{tokens} tokens in {self._steps} steps of {self._running} requests")
        runner = last.runner - first.runner
        process, thread = last.process - first.process, last.thread - first.thread
        per_token = 1e6 / tokens
        return TokenCost(
            running=self._running,
            steps=self._steps,
            tokens=tokens,
            host=(process - runner) * per_token,
            engine=(thread - runner) * per_token,
            loop=(process - thread) * per_token,
            runner=runner * per_token,
        )


def staggered_prompt(index: int) -> list[int]:
    """32 to 47 bytes that no other index below 2**16 has."""
    head = [1 + index % 251, 1 + index // 251 % 251, 1 + index // 63_001]
    return head + [7] * (29 + index % 16)
