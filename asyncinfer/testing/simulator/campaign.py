"""`simulate`: many lives, one per seed, in one process or several."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncinfer.testing.simulator.drawn import Drawn
from asyncinfer.testing.simulator.life import Life
from asyncinfer.testing.simulator.plugins import Plugins
from asyncinfer.testing.simulator.trace import SimulationTrace, quiet

__all__ = ["Checking", "SimulationReport", "live", "simulate"]

#: "full": the scheduler's invariants at every step. "light": at every 64th, and at the end of
#: each life; tokens, waits and ends are checked all the same.
Checking = Literal["full", "light"]
_EVERY = {"full": 1, "light": 64}

#: Steps of one life at most, by chance.
LIFE = (40, 400)
#: Lives that a process is given at a time.
BATCH = 4


@dataclass(slots=True)
class SimulationReport:
    """What a simulation did and found."""

    #: The first life's; every other one has the next.
    seed: int = 0
    #: Lives, and steps of the model in them.
    lives: int = 0
    steps: int = 0
    #: Seconds it took.
    seconds: float = 0.0
    #: What happened, and how often.
    events: Counter[str] = field(default_factory=Counter)
    #: Lives that failed, as small as they could be made.
    failures: list[SimulationTrace] = field(default_factory=list)

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0

    def add(self, other: SimulationReport) -> None:
        """Everything but the seed and the seconds."""
        self.lives += other.lives
        self.steps += other.steps
        self.events.update(other.events)
        self.failures += other.failures


def simulate(
    seed: int = 0,
    steps: int = 10_000,
    *,
    jobs: int = 1,
    checking: Checking = "full",
    most_failures: int = 1,
    shrink: int = 400,
    progress: Callable[[SimulationReport], object] | None = None,
    **plugins: Any,
) -> SimulationReport:
    """Live random lives of an engine, with seeds `seed`, `seed + 1` and so on, until so many steps
    were taken or so many lives failed.

    A life is an engine on a fake model, one event loop or two, and consumers that read, wait, leave
    and hang, with faults of every kind in between. All of it is the engine's own code, but for the
    model, the clock and the threads: it runs on one thread in virtual time, and the same seed gives
    the same life.

    Args:
        steps: of the model, all lives together; the last life is finished.
        jobs: processes.
        checking: see `Checking`.
        shrink: lives spent on making a failure small; 0 leaves it as it is.
        progress: called now and then with the report so far; ends the simulation by giving True.
        plugins: `cache_policy` and `scheduler` in place of what a life draws: a name, a name with
            arguments as a tuple, or what makes one, such as its class (with `jobs` above 1, one
            that can be pickled). Each life makes its own, and fails if it raises, lies or is too
            slow.

    Raises:
        ValueError, PluginError: the plugins are none.
    """
    if steps < 1 or jobs < 1:
        raise ValueError(f"steps={steps!r}, jobs={jobs!r}: must be >= 1")
    report, began = SimulationReport(seed), time.perf_counter()
    work = _in_processes if jobs > 1 else _here
    for part in work(seed, jobs, checking, shrink, plugins):
        report.add(part)
        report.seconds = time.perf_counter() - began
        told = progress is not None and progress(report) is True
        if told or report.steps >= steps or len(report.failures) >= most_failures:
            break
    return report


def live(
    seed: int, checking: Checking = "full", shrink: int = 400, plugins: Plugins | None = None
) -> SimulationReport:
    """The life of one seed."""
    drawn = Drawn(seed, LIFE)
    life = Life(drawn.scenario, drawn, plugins=plugins, every=_EVERY[checking])
    report = SimulationReport(lives=1)
    with quiet(), _one_thread():
        try:
            life.run()
        except Exception as error:
            said = str(error) or repr(error)
            trace = SimulationTrace(seed, drawn.scenario, life.trace, said, dict(plugins or {}))
            report.failures.append(trace.smaller(shrink) if shrink else trace)
    report.events = life.seen
    report.steps = life.seen["steps"]
    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    """Turn torch's own threads off, if it is there: for a tensor of a few rows they spend their
    time waiting for one another."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _here(
    seed: int, jobs: int, checking: Checking, shrink: int, plugins: Plugins
) -> Iterator[SimulationReport]:
    # Existing objects are in no cycle of a life, and lives make few cycles: collections took a
    # twentieth of their time. Objects that the caller froze stay frozen.
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(20_000, *before[1:])
    try:
        while True:
            yield live(seed, checking, shrink, plugins)
            seed += 1
    finally:
        gc.set_threshold(*before)
        if ours:
            gc.unfreeze()


def _in_processes(
    seed: int, jobs: int, checking: Checking, shrink: int, plugins: Plugins
) -> Iterator[SimulationReport]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=_begin) as pool:
        try:
            waiting: list[Future[SimulationReport]] = []
            while True:
                while len(waiting) < 2 * jobs:
                    waiting.append(pool.submit(_batch, seed, checking, shrink, plugins))
                    seed += BATCH
                yield waiting.pop(0).result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """In each process."""
    # A terminal sends it to all of them; the first one decides when they end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


def _batch(seed: int, checking: Checking, shrink: int, plugins: Plugins) -> SimulationReport:
    report = SimulationReport()
    for each in range(seed, seed + BATCH):
        report.add(live(each, checking, shrink, plugins))
    return report
