"""`asyncinfer bench kernels`: every kernel beside its exact answer and its own floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncinfer.bench.record import Figure
from benchmarks.ceilings import Ceilings, bench_device, bench_dtype, measure_ceilings
from benchmarks.shapes import EXPERTS, FULL_SHAPES, TINY, TINY_EXPERTS, shape_json

if TYPE_CHECKING:
    import torch

    from asyncinfer.kernels.device_clock import DeviceClock

__all__ = ["KernelOptions", "KernelPoint", "KernelResults", "measure_kernels"]

#: How far a kernel may lie from float64, relative to the largest of its answer, and how many drawn
#: tokens may differ: a few roundings of the dtype.
TOLERANCE: Final = {"cuda": 2e-2, "cpu": 1e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """The work: one decode step's kernels at each shape and batch."""

    #: None given: all of them on a GPU; a CPU gets a smoke run.
    shapes: Sequence[str] = ()
    batches: Sequence[int] = (1, 64)
    context: int = 2048
    repeat: int = 15
    device: str = "auto"
    #: A smoke run on the tiny shape; its figures mean nothing.
    quick: bool = False
    #: Whether the candidates of tiles and splits are timed, too.
    tune: bool = False


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """One kernel at one shape."""

    shape: str
    kernel: str
    title: str
    #: Largest difference from float64 over the largest of the answer.
    error: float
    tolerance: float
    us: float
    #: Bytes over bandwidth or operations over arithmetic, whichever is longer.
    floor_us: float

    @property
    def share(self) -> float:
        """Of the floor, in percent."""
        return 100 * self.floor_us / self.us


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of a kernel at one shape."""

    shape: str
    title: str
    choice: str
    us: float


@dataclass(frozen=True, slots=True)
class KernelResults:
    """All of them."""

    ceilings: Ceilings
    points: tuple[KernelPoint, ...]
    candidates: tuple[Candidate, ...] = ()

    def figures(self) -> tuple[Figure, ...]:
        found = [*self.ceilings.figures()]
        for point in self.points:
            title = f"{point.shape}: {point.title}"
            found += [
                Figure(f"{title}, error", point.error, "", "lower", point.tolerance),
                Figure(title, point.us, "us", "lower"),
                Figure(f"{title}, of the floor", point.share, "%", "higher"),
            ]
        found += [
            Figure(f"{each.shape}: {each.title}, {each.choice}", each.us, "us", "lower")
            for each in self.candidates
        ]
        return tuple(found)


def measure_kernels(
    options: KernelOptions,
    report: Callable[[str], None] = lambda _: None,
    *,
    ceilings: Ceilings | None = None,
    going_on: Callable[[], bool] = lambda: True,
) -> KernelResults:
    """Errors, and medians with no input in a cache. Stops early once `going_on` is false."""
    # They import torch, which a help text does without.
    from asyncinfer.kernels.device_clock import DeviceClock
    from asyncinfer.models import parse_config
    from benchmarks.decode_kernels import kernel_cases

    device = bench_device(options.device)
    quick = options.quick or (device.type == "cpu" and not options.shapes)
    if ceilings is None:
        report("copy bandwidth and matrix product")
        ceilings = measure_ceilings(device, quick=quick)
    clock = DeviceClock(device)
    context = 40 if quick else options.context
    repeat = 3 if quick else options.repeat
    found: list[KernelPoint] = []
    every = (TINY, TINY_EXPERTS) if quick else options.shapes or (*FULL_SHAPES, EXPERTS)
    for shape in every:
        config = parse_config(shape_json(shape))
        for batch in (1, 3) if quick else options.batches:
            for case in kernel_cases(
                config, batch=batch, context=context, device=device, dtype=bench_dtype(device)
            ):
                if not going_on():
                    return KernelResults(ceilings, tuple(found))
                report(f"{shape}: {case.title}")
                seconds = clock.seconds(case.run, repeat=repeat)
                floor = max(case.bytes / ceilings.bandwidth, case.flops / ceilings.flops)
                found.append(
                    KernelPoint(
                        shape=shape,
                        kernel=case.name,
                        title=case.title,
                        error=case.error(),
                        tolerance=TOLERANCE[device.type],
                        us=1e6 * seconds,
                        floor_us=1e6 * floor,
                    )
                )
    # Only Triton's kernels have any.
    tuned = every if options.tune and device.type == "cuda" else ()
    return KernelResults(ceilings, tuple(found), tuple(_candidates(tuned, device, clock, report)))


def _candidates(
    shapes: Sequence[str],
    device: torch.device,
    clock: DeviceClock,
    report: Callable[[str], None],
) -> Iterator[Candidate]:
    from asyncinfer.kernels.measuring import measure_choices
    from asyncinfer.models import parse_config
    from asyncinfer.runner.device import trial_shapes
    from asyncinfer.runner.tuning import tuning_shapes

    for shape in shapes:
        config, dtype = parse_config(shape_json(shape)), bench_dtype(device)
        measured = tuning_shapes(config, trial_shapes(config, dtype, dtype))
        for each in measure_choices(measured, device, clock=clock, on_case=report):
            for choice, seconds in each.times:
                yield Candidate(shape, each.title, str(choice), 1e6 * seconds)
