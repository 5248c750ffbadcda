"""What a steady decode step costs beside its kernels: calls into torch, and a GPU that waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncinfer.bench.record import BenchError, Figure
from benchmarks.decode import StepOptions, opened_driver

__all__ = ["StepCosts", "idle_gaps", "measure_step_costs"]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of one shape at one batch."""

    shape: str
    batch: int
    #: Python-level calls of torch, of the median step.
    torch_calls: float
    #: Microseconds that a GPU does nothing between two steps, of the median step; None on a CPU.
    idle_us: float | None

    def figures(self, *, targets: bool) -> tuple[Figure, ...]:
        where = f"{self.shape}, batch {self.batch}"
        calls = Figure(
            f"torch calls per decode step, {where}",
            self.torch_calls,
            "",
            "lower",
            8.0 if targets else None,
        )
        if self.idle_us is None:
            return (calls,)
        target = 50.0 if targets else None
        idle = Figure(f"GPU idle between steps, {where}", self.idle_us, "us", "lower", target)
        return (calls, idle)


def measure_step_costs(shape: str, batch: int, context: int, options: StepOptions) -> StepCosts:
    """Counted and profiled over `options.steps` decode steps, in two runs of them."""
    from statistics import median

    from torch.overrides import TorchFunctionMode

    class Counter(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counter.calls += 1
            return func(*args, **(kwargs or {}))

    counts: list[int] = []

    with opened_driver(shape, [(batch, context)], options) as driver:
        runner = driver.runner
        launch, collect = runner.launch, runner.collect

        class Counted:
            """The runner, with every step counted."""

            spec = runner.spec

            def launch(self, plan: Any) -> object:
                before = Counter.calls
                with Counter():
                    flight = launch(plan)
                if any(plan.samples):
                    counts.append(Counter.calls - before)
                return flight

            def collect(self, handle: object) -> Any:
                with Counter():
                    before = Counter.calls
                    result = collect(handle)
                if counts:
                    counts[-1] += Counter.calls - before
                return result

            def prepare(self) -> bool:
                raise AssertionError

            def close(self) -> None:
                raise AssertionError

        driver.decode(batch, context, steps=options.steps)
        driver.runner = Counted()
        driver.decode(batch, context, steps=options.steps)
        driver.runner = runner
        idle = _idle_us(driver, batch, context, options)
    return StepCosts(shape, batch, float(median(counts)), idle)


def _idle_us(driver: Any, batch: int, context: int, options: StepOptions) -> float | None:
    """From a profile of the device's own activity."""
    from statistics import median

    from benchmarks.ceilings import bench_device

    if bench_device(options.device).type != "cuda":
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        driver.decode(batch, context, steps=options.steps)
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if "cuda" in str(event.device_type).lower() and not event.name.startswith("Memcpy")
    ]
    gaps = idle_gaps(spans)
    if len(gaps) < options.steps:
        raise BenchError(f"the profile has {len(gaps)} gaps in {options.steps} steps")
    # Kernels of a step follow each other closely: the longest gaps are those between steps.
    return float(median(sorted(gaps)[-options.steps :]))


def idle_gaps(spans: Sequence[tuple[float, float]]) -> list[float]:
    """How long nothing ran, between the first of `spans` and the last, in their unit."""
    found = []
    until = float("inf")
    for start, end in sorted(spans):
        if start > until:
            found.append(start - until)
        until = end if until == float("inf") else max(until, end)
    return found
