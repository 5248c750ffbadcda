"""`asyncinfer bench h200`: what one GPU and the engine on it do, within ten minutes.

One part after the other, each with a share of the time. A part that raises is recorded with its
error, and the rest goes on. What was measured is handed on after every part, and in a burst before
every peer.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.host_tokens import measure_tokens
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.record import BenchError, Figure
from benchmarks.burst import BurstResult, burst_work, measure_burst
from benchmarks.ceilings import Ceilings, bench_device, is_h200, measure_ceilings
from benchmarks.decode import StepOptions, measure_decode, measure_prefill
from benchmarks.host_steps import measure_scheduler
from benchmarks.interference import InterferenceOptions, measure_interference
from benchmarks.kernels import KernelOptions, measure_kernels
from benchmarks.shapes import EXPERTS, TINY, shape_json
from benchmarks.step_costs import measure_step_costs

__all__ = ["MEASURES", "PARTS", "GpuOptions", "GpuResult", "Part", "measure_gpu"]

#: Parts in the order they run, with the seconds that each may take at most.
PARTS: Final[Mapping[str, float]] = {
    "ceilings": 20,
    "kernels": 140,
    "decode": 150,
    "prefill": 40,
    "step": 40,
    "interference": 60,
    "host": 40,
    "burst": 200,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """The work."""

    parts: Sequence[str] = tuple(PARTS)
    #: Of the whole run.
    seconds: float = 600.0
    device: str = "auto"
    #: A smoke run on the tiny shape, which is all that a CPU gets. Its figures mean nothing.
    quick: bool = False


Measured = tuple[tuple[Figure, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run."""

    name: str
    seconds: float
    #: The part's own result, as JSON data; nothing if it failed.
    detail: Mapping[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    #: Why it has none.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GpuResult:
    """The parts so far."""

    parts: tuple[Part, ...] = ()

    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for part in self.parts for figure in part.figures)

    def detail(self) -> dict[str, Any]:
        return {
            "parts": [
                {
                    "name": part.name,
                    "seconds": part.seconds,
                    "error": part.error,
                    "detail": dict(part.detail),
                }
                for part in self.parts
            ]
        }


class _Run:
    """What the parts share."""

    def __init__(self, options: GpuOptions, report: Callable[[str], None]) -> None:
        self.device = bench_device(options.device)
        self.report = report
        self.quick = options.quick or self.device.type == "cpu"
        self.targets = is_h200(self.device) and not self.quick
        self.ends = time.monotonic() + options.seconds
        self.ceilings: Ceilings | None = None
        #: Is handed what the part has so far.
        self.save: Callable[[Measured], None] = lambda _: None
        self._part_ends = self.ends

    def begin(self, seconds: float) -> None:
        self._part_ends = min(self.ends, time.monotonic() + seconds)

    def seconds_left(self) -> float:
        """Of the part."""
        return self._part_ends - time.monotonic()

    def going_on(self) -> bool:
        return self.seconds_left() > 0

    def known(self) -> Ceilings:
        """Of this run, measured when they are first needed."""
        if self.ceilings is None:
            self.ceilings = measure_ceilings(self.device, quick=self.quick)
        return self.ceilings

    def steps(self, **changes: Any) -> StepOptions:
        quick = {"quick": True, "steps": 6, "repeat": 1, "max_step_tokens": 64}
        chosen: dict[str, Any] = {"device": str(self.device), **(quick if self.quick else changes)}
        return StepOptions(**chosen)


def measure_gpu(
    options: GpuOptions,
    report: Callable[[str], None] = lambda _: None,
    save: Callable[[GpuResult], None] = lambda _: None,
) -> GpuResult:
    """Run the parts; `save` is handed what there is after each, and within those that take long."""
    run = _Run(options, report)
    result = GpuResult()
    for name in options.parts:
        if name not in MEASURES:
            raise BenchError(f"part {name!r}: must be one of {', '.join(MEASURES)}")
    for name in options.parts:
        began = time.monotonic()
        if began >= run.ends:
            part = Part(name, 0.0, error="no time left")
        else:
            run.begin(PARTS[name])
            run.save = partial(_save_unfinished, save, result, name)
            try:
                figures, detail = MEASURES[name](run)
                part = Part(name, time.monotonic() - began, detail, figures)
            except Exception as error:  # whatever it is, the other parts are still worth having
                text = f"{type(error).__name__}: {error} ({_place(error)})"
                part = Part(name, time.monotonic() - began, error=text)
            _give_back(run)
        result = GpuResult((*result.parts, part))
        save(result)
    return result


def _save_unfinished(
    save: Callable[[GpuResult], None], before: GpuResult, name: str, measured: Measured
) -> None:
    figures, detail = measured
    save(GpuResult((*before.parts, Part(name, 0.0, detail, figures, error="not done"))))


def _place(error: Exception) -> str:
    """Where it was raised: an assertion says nothing else."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}, {last.name}"


def _ceilings(run: _Run) -> Measured:
    run.report("copy bandwidth and matrix product")
    ceilings = run.known()
    return ceilings.figures(), dataclasses.asdict(ceilings)


def _kernels(run: _Run) -> Measured:
    # The largest shape and the smallest: what lies between compiles as many kernels again.
    options = KernelOptions(
        shapes=("llama-3.1-8b", "qwen3-0.6b", EXPERTS), device=str(run.device), quick=run.quick
    )
    found = measure_kernels(options, run.report, ceilings=run.known(), going_on=run.going_on)
    # All of it is in the detail; here is what may be wrong.
    worst: dict[str, tuple[float, float]] = {}
    for point in found.points:
        so_far = worst.get(point.kernel, (0.0, 0.0))
        worst[point.kernel] = max(so_far, (point.error, point.tolerance))
    figures = [
        Figure(f"{kernel}, largest error", error, "", "lower", tolerance)
        for kernel, (error, tolerance) in worst.items()
    ]
    return tuple(figures), dataclasses.asdict(found)


def _decode(run: _Run) -> Measured:
    found = measure_decode(run.steps(), run.report, ceilings=run.known(), going_on=run.going_on)
    # The ceilings are a part of their own.
    return found.figures()[2:], dataclasses.asdict(found)


def _prefill(run: _Run) -> Measured:
    options = run.steps(contexts=(2048, 8192), batches=(1,))
    found = measure_prefill(options, run.report, ceilings=run.known(), going_on=run.going_on)
    return found.figures()[2:], dataclasses.asdict(found)


def _step(run: _Run) -> Measured:
    shape, batch, context = (TINY, 2, 40) if run.quick else ("llama-3.1-8b", 1, 2048)
    run.report(f"{shape}: torch calls and idle time of a step")
    found = measure_step_costs(shape, batch, context, run.steps())
    return found.figures(targets=run.targets), dataclasses.asdict(found)


def _interference(run: _Run) -> Measured:
    options = InterferenceOptions(shape="llama-3.2-1b", device=str(run.device))
    if run.quick:
        options = InterferenceOptions(
            shape=TINY,
            device=str(run.device),
            streams=4,
            long_prompt=512,
            tokens=60,
            shared=64,
            own=16,
            repeat=1,
        )
    run.report(f"{options.shape}: the engine beside a host that does something too")
    found = run_on("asyncio", measure_interference, options)
    return found.figures(targets=run.targets), dataclasses.asdict(found)


def _host(run: _Run) -> Measured:
    running, steps = (16, 10) if run.quick else (256, 200)
    run.report(f"the host's share of a step, {running} running")
    scheduler = measure_scheduler(running, steps)
    tokens = run_on("asyncio", measure_tokens, running, steps, 5)
    limits = (1.0, 8.0) if run.targets else (None, None)
    figures = (
        Figure(
            f"schedule + update, {running} running",
            scheduler.both.mean / 1e3,
            "ms",
            "lower",
            limits[0],
        ),
        Figure(f"host CPU per token, {running} consumers", tokens.host, "us", "lower", limits[1]),
    )
    detail = {"scheduler": dataclasses.asdict(scheduler), "tokens": dataclasses.asdict(tokens)}
    return figures, detail


def _burst(run: _Run) -> Measured:
    shape = TINY if run.quick else "qwen3-0.6b"
    config = shape_json(shape)
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as folder:
        run.report(f"writing {shape}")
        write_checkpoint(config, Path(folder))
        sizes = (6, 4, 12) if run.quick else (256, 100, 1024)
        work = burst_work(Path(folder), config["vocab_size"], str(run.device), *sizes)
        found = measure_burst(
            work,
            run.report,
            seconds_left=run.seconds_left,
            save=lambda found: run.save(_measured_burst(run, found)),
        )
    return _measured_burst(run, found)


def _measured_burst(run: _Run, found: BurstResult) -> Measured:
    return found.figures(targets=run.targets), dataclasses.asdict(found)


def _give_back(run: _Run) -> None:
    """Memory that the next part may need."""
    gc.collect()
    if run.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


MEASURES: Final[Mapping[str, Callable[[_Run], Measured]]] = {
    "ceilings": _ceilings,
    "kernels": _kernels,
    "decode": _decode,
    "prefill": _prefill,
    "step": _step,
    "interference": _interference,
    "host": _host,
    "burst": _burst,
}
