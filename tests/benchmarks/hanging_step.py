"""How late awaits end, and for how long stats() and health() are wrong, while a step hangs.

python -m benchmarks.hanging_step [REQUESTS [SECONDS]]

The runner never comes back from its launch, or from its collect. An event loop is late, too, where
the machine is busy: what is promised is 50 ms beyond that for a wait, and 100 ms for the counters.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import anyio

from asyncinfer import AsyncInferError, Engine, EngineConfig, EngineDead
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.ticker import ticking
from asyncinfer.testing import FakeModel

__all__ = ["CASES", "PHASES", "Hanging", "measure_hanging_step"]

#: What ends the waits.
CASES: Final = ("deadline", "cancellation", "close", "death")
#: Where the step hangs.
PHASES: Final = ("launch", "collect")
WAIT_MS: Final = 50.0
COUNTERS_MS: Final = 100.0
DEFAULTS: Final = ("200", "1.0")


class Hanging(NamedTuple):
    """Milliseconds, each the longest of all requests."""

    case: str
    phase: str
    #: The errors that ended the waits.
    ended_by: tuple[str, ...]
    #: From the moment that a wait was to end at until it ended.
    wait: float
    #: The latest tick of the event loop.
    loop: float
    #: For how long stats() did not say how many requests had their place.
    stats: float
    #: For how long health() was of another state.
    health: float
    #: A call of both.
    call: float

    @property
    def kept(self) -> bool:
        """Whether each wait and the counters kept their promise."""
        return (
            self.wait <= self.loop + WAIT_MS
            and max(self.stats, self.health) <= self.loop + COUNTERS_MS
        )


class _Gate:
    """Every step stays in one of its phases until it is let out."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self.began: float | None = None
        self.out = threading.Event()

    def __call__(self, phase: str, step: object) -> None:
        if phase == self._phase:
            if self.began is None:
                self.began = time.perf_counter()
            self.out.wait()


class _Wrong:
    """For how long something was not as it should be."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._right = time.perf_counter()

    def look(self, right: bool) -> None:
        now = time.perf_counter()
        if right:
            self._right = now
        self.longest = max(self.longest, (now - self._right) * 1e3)


class _Trial:
    """One engine whose first step hangs."""

    def __init__(self, case: str, phase: str, requests: int, after: float) -> None:
        self.case, self.phase, self.requests, self.after = case, phase, requests, after
        self.gate = _Gate(phase)
        self.config = EngineConfig(
            max_requests=requests + 1,
            step_timeout=after if case == "death" else 4 * after,
            drain_timeout=after,
        )
        #: Requests that the decode thread was given, and those that are waited for.
        self.taken = self.live = 0
        self.ended_by: set[str] = set()
        self.late: list[float] = []
        #: When each request's wait was to end; infinite while nothing is to end it.
        self.due = [math.inf] * requests

    async def run(self) -> Hanging:
        engine = await Engine.open(FakeModel(gate=self.gate), config=self.config)
        scopes = [anyio.CancelScope() for _ in range(self.requests)]
        stats, health, call = _Wrong(), _Wrong(), 0.0
        try:
            async with ticking() as ticker, anyio.create_task_group() as tasks:
                for index, scope in enumerate(scopes):
                    tasks.start_soon(self._ask, engine, index, scope)
                # One that is cancelled before the decode thread has it gives its place up at once.
                while self.gate.began is None or self.taken < self.requests:
                    await anyio.sleep(0.001)
                tasks.start_soon(self._event, engine, scopes)
                stats, health = _Wrong(), _Wrong()
                while self.live or not self._slow():
                    began = time.perf_counter()
                    counted, told = engine.stats(), engine.health()
                    call = max(call, (time.perf_counter() - began) * 1e3)
                    stats.look(counted.running + counted.waiting == self._held())
                    health.look(told.state in self._states())
                    await anyio.sleep(0.002)
                self.gate.out.set()
            loop = max(ticker.late)
        finally:
            self.gate.out.set()
            with suppress(EngineDead):
                await engine.aclose()
        by, late = tuple(sorted(self.ended_by)), max(self.late)
        return Hanging(self.case, self.phase, by, late, loop, stats.longest, health.longest, call)

    async def _ask(self, engine: Engine, index: int, scope: anyio.CancelScope) -> None:
        deadline, ended_by = None, "cancellation"
        if self.case == "deadline":
            deadline = self.after * (1 + index / self.requests)
            self.due[index] = time.perf_counter() + deadline
        self.live += 1
        try:
            with scope:
                async with engine.stream("hello", max_tokens=9, deadline=deadline) as stream:
                    self.taken += 1
                    await stream
                ended_by = "answer"
        except AsyncInferError as error:
            ended_by = type(error).__name__
        ended = time.perf_counter()
        self.live -= 1
        self.ended_by.add(ended_by)
        self.late.append((ended - self.due[index]) * 1e3)

    async def _event(self, engine: Engine, scopes: list[anyio.CancelScope]) -> None:
        """What ends the waits, but for their own deadlines."""
        began = self.gate.began
        assert began is not None
        if self.case == "cancellation":
            for index, scope in enumerate(scopes):
                self.due[index] = time.perf_counter()
                scope.cancel()
                await anyio.sleep(0.001)
        elif self.case == "close":
            self.due = [time.perf_counter() + self.after] * self.requests
            await engine.aclose()
        elif self.case == "death":
            self.due = [began + self.after] * self.requests

    def _held(self) -> int:
        """How many requests have their place: one that is left keeps it until the step has ended,
        which computes it."""
        return self.requests if self.case == "cancellation" else self.live

    def _slow(self) -> bool:
        """Whether the step has hung for long enough to be reported."""
        assert self.gate.began is not None
        return time.perf_counter() - self.gate.began > self.config.step_timeout / 4

    def _states(self) -> tuple[str, ...]:
        """What health() may say now."""
        if self.case == "close":
            return ("draining", "closed")
        if self.case == "death" and time.perf_counter() > self.due[0]:
            return ("dead",)
        return ("degraded",) if self._slow() else ("open",)


def measure_hanging_step(requests: int, after: float, loop: str = "asyncio") -> list[Hanging]:
    """Each case in each phase; the waits are to end `after` seconds or so from their beginning."""
    return [
        run_on(loop, _Trial(case, phase, requests, after).run) for case in CASES for phase in PHASES
    ]


def main() -> None:
    requests, after = (*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :])
    found: list[Any] = []
    columns = ("wait", "loop", "stats", "health", "call")
    print(f"{'case':12} {'in':8} {'ended by':18}", *(f"{name:>8}" for name in columns))
    for loop in ("asyncio", "trio"):
        for each in measure_hanging_step(int(requests), float(after), loop):
            found.append(each)
            figures = (f"{getattr(each, name):8.2f}" for name in columns)
            print(
                f"{each.case:12} {each.phase:8} {','.join(each.ended_by):18}", *figures, flush=True
            )
    sys.exit(not all(each.kept for each in found))


if __name__ == "__main__":
    main()
