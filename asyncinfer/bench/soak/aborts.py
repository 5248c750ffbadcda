"""Requests that are aborted at a random moment: how soon their pages are free, and what leaks."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from asyncinfer import Engine, EngineConfig
from asyncinfer.bench.gates import Phase
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.soak.drained import pages_lost, places_lost
from asyncinfer.bench.soak.process import Holdings, in_use_mib, rss_mib, settled
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import FakeModel, Step, Tokenizer

__all__ = ["AbortRun", "measure_aborts"]

#: Callers at once. The engine holds more requests: a prompt that was left while a worker thread is
#: in the middle of it may count until the thread looks.
CALLERS, REQUESTS = 32, 64
#: Of so many callers one has its prompts tokenised: there are two threads for that.
TOKENISING = 8
#: Characters of a prompt that takes some milliseconds to tokenise, on a worker thread.
LONG = 20_000
#: Room for all of them, and little more: the prefix cache is full before half of it is done.
BLOCKS = 4096
#: Seconds of a step, and until the latest of those that leave while they are tokenised.
STEP, PATIENCE = 0.003, 0.03


@dataclass(frozen=True, slots=True)
class AbortRun:
    """The result of aborting `decoding` and `tokenising` requests."""

    decoding: int
    tokenising: int
    step_ms: float
    #: Milliseconds from leaving until the engine has confirmed, which it does once the request's
    #: pages are free; of those that were decoding.
    freed: Quantiles
    #: Milliseconds that leaving took of those that were tokenised.
    left: Quantiles
    pages_lost: int
    places_lost: int
    #: Threads, tasks and file descriptors beyond those before the engine.
    beyond: dict[str, int]
    #: MiB that were taken from malloc and not given back over the second half; resident ones where
    #: the system does not say.
    growth: float


async def measure_aborts(count: int, seed: int, report: Callable[[str], None]) -> AbortRun:
    """Leave `count` requests, half of them while they are tokenised."""
    before = Holdings.now()

    def gate(phase: Phase, plan: Step) -> None:
        if phase == "collect":
            time.sleep(STEP)

    model = FakeModel(
        blocks=BLOCKS,
        max_context=LONG,
        strict=False,
        gate=gate,
        tokenizer=Tokenizer.from_folder(MODEL_PATH),
    )
    config = EngineConfig(max_running=CALLERS, max_requests=REQUESTS, drain_timeout=0.0)
    async with Engine(model, config=config) as engine:
        run, held, lost = _Aborts(engine, seed, report), [], 0
        for half in (1, 2):
            run.each = (half * count + 3) // 4
            async with anyio.create_task_group() as tasks:
                for index in range(CALLERS):
                    tasks.start_soon(run.call, index)
            lost = await pages_lost(engine)
            gc.collect()
            held.append(in_use_mib() or rss_mib())
        places = await places_lost(engine, REQUESTS)
    return AbortRun(
        decoding=len(run.freed),
        tokenising=len(run.left),
        step_ms=STEP * 1e3,
        freed=Quantiles.of(run.freed),
        left=Quantiles.of(run.left),
        pages_lost=lost,
        places_lost=places,
        beyond=await settled(before),
        growth=held[1] - held[0],
    )


@dataclass
class _Aborts:
    """The callers."""

    engine: Engine
    seed: int
    report: Callable[[str], None]
    #: So many of either kind are to be left.
    each: int = 0
    freed: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)

    async def call(self, index: int) -> None:
        choose = random.Random(f"{self.seed} {index}")
        text = "".join(choose.choices("etaoin shrdlu", k=LONG))
        while True:
            if index % TOKENISING == 0 and len(self.left) < self.each:
                start = choose.randrange(LONG // 8)
                await self._leave_tokenising(text[start:], choose)
            elif len(self.freed) < self.each:
                await self._leave_decoding(choose)
            else:
                return
            self.report(f"aborts: {len(self.freed) + len(self.left):,}")

    async def _leave_decoding(self, choose: random.Random) -> None:
        prompt = "".join(choose.choices("etaoin shrdlu", k=choose.randint(1, 200)))
        stay = choose.randrange(12)
        began: float | None = None
        with anyio.CancelScope() as scope:
            stream = self.engine.stream(prompt, max_tokens=64, temperature=0.0, ignore_eos=True)
            async with stream:
                for _ in range(stay):
                    await anext(stream)
                began = time.perf_counter()
                if choose.random() < 0.5:
                    # Cancelled from another task, in the middle of a read.
                    scope.cancel()
                    await anext(stream)
        if began is not None:
            self.freed.append((time.perf_counter() - began) * 1e3)

    async def _leave_tokenising(self, text: str, choose: random.Random) -> None:
        entered = False
        patience = choose.random() * PATIENCE
        due = time.perf_counter() + patience
        with anyio.move_on_after(patience):
            async with self.engine.stream(text, max_tokens=4, temperature=0.0) as stream:
                entered = True
                await stream
        if not entered:
            self.left.append((time.perf_counter() - due) * 1e3)
        await anyio.sleep(choose.random() * PATIENCE)
