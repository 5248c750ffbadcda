"""Every part of `asyncinfer bench soak`, in turn, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from asyncinfer.bench.loops import run_on
from asyncinfer.bench.record import Figure
from asyncinfer.bench.soak.aborts import AbortRun, measure_aborts
from asyncinfer.bench.soak.cycles import CloseRun, CycleRun, measure_close, measure_cycles
from asyncinfer.bench.soak.load import LoadRun, Sample, measure_load
from asyncinfer.bench.soak.overload import (
    ImpatientRun,
    OverloadRun,
    measure_impatient,
    measure_overload,
)

__all__ = ["SoakOptions", "SoakResult", "measure_soak"]

#: Share of the samples that belong to the warm-up.
WARM_UP: Final = 0.2
#: Seconds from which on growth is stated per hour: of less, it would be mostly noise.
LONG_ENOUGH: Final = 900.0

#: Where memory is: a figure's name, its unit, the target per hour, and what samples say of it.
HOLDERS: Final[tuple[tuple[str, str, float | None, Callable[[Sample], float | None]], ...]] = (
    ("memory's growth", "MiB", 5.0, lambda sample: sample.rss),
    ("  of what was taken from malloc", "MiB", 5.0, lambda sample: sample.in_use),
    ("  of what malloc keeps for later", "MiB", None, lambda sample: sample.kept),
    ("  of Python's memory blocks", "blocks", None, lambda sample: sample.python_blocks),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """The sizes of the parts."""

    loop: str = "asyncio"
    #: Of the load; the other parts take a minute or two beside.
    seconds: float = 60.0
    seed: int = 1
    #: Streams held at once, and the tokens a second of all of them.
    streams: int = 2000
    rate: float = 20_000.0
    #: Requests aborted at random moments.
    aborts: int = 10_000
    #: Engines opened and closed.
    cycles: int = 500
    #: Streams that are live when an engine is closed.
    live: int = 1000
    #: Of ten times too many callers.
    overload_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Every part, with its samples."""

    cycles: CycleRun
    load: LoadRun
    aborts: AbortRun
    close: CloseRun
    overload: OverloadRun
    impatient: ImpatientRun

    def figures(self) -> tuple[Figure, ...]:
        return (*self.counts(), *self.times())

    def counts(self) -> tuple[Figure, ...]:
        """Figures that must be 0 on every machine, however slow."""
        load, aborts, tokens = self.load, self.aborts, self.load.counts
        found = {
            "tokens lost": tokens.lost,
            "tokens doubled": tokens.doubled,
            "tokens that differ from the right answer": tokens.wrong,
            "tokens after an abort": tokens.late,
            "errors that consumers met": sum(load.errors.values()),
            "pages not back after the load": load.pages_lost,
            "pages not back after the aborts": aborts.pages_lost,
            "places not back": load.places_lost
            + aborts.places_lost
            + self.overload.places_lost
            + self.impatient.places_lost,
            "streams not told of a close": self.close.streams - self.close.told,
            "closes that raised": sum(self.cycles.errors.values()),
        }
        for name in ("threads", "descriptors", "tasks"):
            parts = (self.cycles, aborts, self.close)
            found[f"{name} left behind"] = sum(part.beyond[name] for part in parts)
        return tuple(Figure(name, value, "", "lower", 0.0) for name, value in found.items())

    def times(self) -> tuple[Figure, ...]:
        """Figures that depend on the machine."""
        load, aborts, impatient = self.load, self.aborts, self.impatient
        held = median(sample.held for sample in load.samples)
        found = [
            Figure("tokens checked", load.counts.delivered, "", "higher"),
            Figure("streams held at once", held, "", "higher", 0.98 * load.streams),
            Figure("tokens a second", load.rate, "tokens/s", "higher", 0.98 * load.asked),
        ]
        for name, lag in (("", load.busy), (", 1 MB prompts", load.beside_long)):
            if lag["count"]:
                p99, most = (lag[at] - load.idle[at] for at in ("p99", "max"))
                found.append(Figure(f"added lag p99{name}", p99, "ms", "lower", 5.0))
                found.append(Figure(f"added lag max{name}", most, "ms", "lower", 50.0))
        bound = aborts.step_ms + 50.0
        found += [
            Figure("abort until pages are free, p99", aborts.freed.p99, "ms", "lower", bound),
            Figure("leaving while tokenised, p99", aborts.left.p99, "ms", "lower"),
            Figure("memory's growth over half of the aborts", aborts.growth, "MiB", "lower"),
            Figure("memory's growth over half of the cycles", self.cycles.growth(), "MiB", "lower"),
            *self._growth(),
            Figure(
                f"close with {self.close.streams} streams", self.close.seconds, "s", "lower", 2.0
            ),
            Figure("  event loop late meanwhile", self.close.blocked, "ms", "lower", 20.0),
            Figure("  longest turn of the loop, CPU time", self.close.busy, "ms", "lower", 20.0),
            Figure("refused, p99", self.overload.refused.p99, "ms", "lower", 5.0),
            Figure("TTFT of the admitted over unloaded", self._ttft_ratio(), "x", "lower", 2.0),
            Figure("40 callers at once, 4 places: refused", impatient.refused, "", "higher", 36.0),
            Figure(
                "  next prompt waits longer by",
                impatient.after_a_burst - impatient.alone,
                "s",
                "lower",
                1.0,
            ),
            Figure(
                "40 callers in a row: next prompt waits longer by",
                impatient.after_a_row - impatient.alone,
                "s",
                "lower",
                1.0,
            ),
        ]
        return tuple(found)

    def _growth(self) -> list[Figure]:
        """Of the median over the last fifth, beside that over the first one after the warm-up."""
        samples = self.load.samples
        warm = samples[int(WARM_UP * len(samples)) :]
        # A prompt of a megabyte takes some hundred while it is on its way.
        quiet = [sample for sample in warm if not sample.long_prompt] or list(warm)
        fifth = max(1, len(quiet) // 5)
        early, late = quiet[:fifth], quiet[-fifth:]
        hours = (median(s.seconds for s in late) - median(s.seconds for s in early)) / 3600
        found = []
        for name, unit, target, measure in HOLDERS:
            before, after = (_median(part, measure) for part in (early, late))
            if before is None or after is None:
                continue
            grown = after - before
            if self.load.seconds < LONG_ENOUGH:
                found.append(Figure(name, grown, unit, "lower"))
            else:
                found.append(Figure(name, grown / hours, f"{unit}/h", "lower", target))
        return found

    def _ttft_ratio(self) -> float:
        return self.overload.admitted.p50 / self.overload.unloaded.p50


def _median(samples: Sequence[Sample], measure: Callable[[Sample], float | None]) -> float | None:
    """None where a sample lacks it."""
    values = [value for value in map(measure, samples) if value is not None]
    return median(values) if len(values) == len(samples) else None


def measure_soak(
    options: SoakOptions, report: Callable[[str], None] = lambda _: None
) -> SoakResult:
    """Run everything; `report` is told what is going on. Raises `BenchError`."""
    cycles = run_on(options.loop, measure_cycles, options.cycles, report)
    aborts = run_on(options.loop, measure_aborts, options.aborts, options.seed, report)
    report(f"closing with {options.live} streams")
    close = run_on(options.loop, measure_close, options.live)
    report("ten times too many callers")
    overload = run_on(options.loop, measure_overload, options.overload_seconds)
    report("callers that do not wait")
    impatient = run_on(options.loop, measure_impatient, options.seed)
    # The load comes last: a fault in a shorter part then shows before an hour has passed.
    load = run_on(
        options.loop,
        measure_load,
        options.streams,
        options.rate,
        options.seconds,
        options.seed,
        report,
    )
    return SoakResult(cycles, load, aborts, close, overload, impatient)
