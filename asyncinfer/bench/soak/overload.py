"""More callers than an engine takes: how soon they are refused, and what the others feel."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from statistics import median

import anyio

from asyncinfer import Engine, EngineConfig, Overloaded
from asyncinfer.bench.gates import Phase
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
from asyncinfer.bench.soak.drained import places_lost
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import FakeModel, Step, Tokenizer

__all__ = ["ImpatientRun", "OverloadRun", "measure_impatient", "measure_overload"]

#: Requests held, tokens of an answer, seconds of a step.
HELD, ANSWER, STEP = 32, 100, 0.005
#: How much more arrives than can be answered, and how many callers at least: a machine may be
#: busy with other things for all of the time.
TIMES, LEAST = 10, 4 * HELD
#: Callers that wait for `PATIENCE` seconds, beside an engine that holds `FEW`.
CALLERS, FEW, PATIENCE = 40, 4, 0.01
#: Characters of their prompts: a tenth of a second to tokenise.
LONG = 200_000


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """In milliseconds."""

    seconds: float
    #: Arrivals a second.
    offered: float
    #: Until `Overloaded` was raised.
    refused: Quantiles
    #: Until the first token: alone, and of those that were admitted.
    unloaded: Quantiles
    admitted: Quantiles
    places_lost: int


@dataclass(frozen=True, slots=True)
class ImpatientRun:
    """`CALLERS` callers with prompts that take longer to tokenise than they wait."""

    #: Of the requests that came at once: refused, and given up.
    refused: int
    gave_up: int
    #: Seconds until the first token of an ordinary prompt: alone, and right after the callers, who
    #: came at once, and one after the other.
    alone: float
    after_a_burst: float
    after_a_row: float
    places_lost: int


async def measure_overload(seconds: float) -> OverloadRun:
    """Requests arrive at ten times the rate at which they can be answered."""
    model = FakeModel(blocks=HELD * 16, max_context=256, strict=False, gate=_step)
    config = EngineConfig(max_running=HELD, max_requests=HELD, drain_timeout=0.0)
    async with Engine(model, config=config) as engine:
        # Their first tokens are all that is looked at.
        unloaded = _Arrivals(engine, tokens=1)
        for _ in range(10):
            await unloaded.one()
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(HELD):
                tasks.start_soon(_Arrivals(engine).one)
        rate = TIMES * HELD / (time.monotonic() - began)
        arrivals = _Arrivals(engine)
        began, sent, gone = time.monotonic(), 0, 0.0
        async with anyio.create_task_group() as tasks:
            while gone < seconds or sent < LEAST:
                for _ in range(int(rate * gone) - sent):
                    tasks.start_soon(arrivals.one)
                    sent += 1
                await anyio.sleep(0.002)
                gone = time.monotonic() - began
        return OverloadRun(
            seconds=gone,
            offered=sent / gone,
            refused=Quantiles.of(arrivals.refused),
            unloaded=Quantiles.of(unloaded.admitted),
            admitted=Quantiles.of(arrivals.admitted),
            places_lost=await places_lost(engine, HELD),
        )


async def measure_impatient(seed: int) -> ImpatientRun:
    """An ordinary prompt's first token, before and after forty callers that wait ten
    milliseconds."""
    model = FakeModel(
        blocks=2 * FEW * LONG // 16,
        max_context=LONG,
        strict=False,
        tokenizer=Tokenizer.from_folder(MODEL_PATH),
    )
    choose = random.Random(seed)
    text = "".join(choose.choices("etaoin shrdlu", k=LONG + CALLERS))
    config = EngineConfig(max_running=FEW, max_requests=FEW, drain_timeout=0.0)
    async with Engine(model, config=config) as engine:
        callers = _Callers(engine, text)
        alone = median([await callers.ordinary() for _ in range(5)])
        async with anyio.create_task_group() as tasks:
            for index in range(CALLERS):
                tasks.start_soon(callers.call, index)
        refused, gave_up = callers.refused, callers.gave_up
        after_a_burst = await callers.ordinary()
        for index in range(CALLERS):
            await callers.call(index)
        after_a_row = await callers.ordinary()
        if refused + gave_up != CALLERS:
            raise BenchError(f"{CALLERS - refused - gave_up} callers were answered in {PATIENCE} s")
        lost = await places_lost(engine, FEW)
    return ImpatientRun(refused, gave_up, alone, after_a_burst, after_a_row, lost)


@dataclass
class _Arrivals:
    """Callers, and what became of them, in milliseconds."""

    engine: Engine
    #: Of an answer.
    tokens: int = ANSWER
    refused: list[float] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)

    async def one(self) -> None:
        began = time.perf_counter()
        first: float | None = None
        try:
            stream = self.engine.stream(
                "hello", max_tokens=self.tokens, temperature=0.0, ignore_eos=True
            )
            async with stream:
                async for _ in stream:
                    if first is None:
                        first = time.perf_counter() - began
        except Overloaded:
            self.refused.append((time.perf_counter() - began) * 1e3)
        if first is not None:
            self.admitted.append(first * 1e3)


@dataclass
class _Callers:
    """Callers that do not wait for long."""

    engine: Engine
    text: str
    refused: int = 0
    gave_up: int = 0

    async def call(self, index: int) -> None:
        with anyio.move_on_after(PATIENCE) as scope:
            try:
                await self.engine.generate(self.text[index:], max_tokens=1, temperature=0.0)
            except Overloaded:
                self.refused += 1
        self.gave_up += scope.cancelled_caught

    async def ordinary(self) -> float:
        """Seconds until the first token of a prompt that is long enough for a worker thread;
        refusals are waited out."""
        began = time.perf_counter()
        while True:
            try:
                await self.engine.generate(self.text[:4096], max_tokens=1, temperature=0.0)
            except Overloaded:
                await anyio.sleep(0.001)
            else:
                return time.perf_counter() - began


def _step(phase: Phase, plan: Step) -> None:
    if phase == "collect":
        time.sleep(STEP)
