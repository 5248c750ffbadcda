"""`asyncinfer bench decode` and `prefill`: steps of the engine's runner beside their floors."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from asyncinfer import EngineConfig
from asyncinfer.bench.record import Figure
from asyncinfer.config import KV, Weights
from asyncinfer.testing import RandomModel
from benchmarks.ceilings import (
    Ceilings,
    bench_device,
    bench_dtype,
    is_h200,
    measure_ceilings,
)
from benchmarks.shapes import FULL_SHAPES, TINY, shape_json
from benchmarks.step_driver import StepDriver

if TYPE_CHECKING:
    import torch

    from asyncinfer.planner import ModelSize, Storage

__all__ = [
    "DECODE_TARGETS",
    "PREFILL_TARGETS",
    "StepOptions",
    "StepPoint",
    "StepResults",
    "measure_decode",
    "measure_prefill",
    "opened_driver",
]

#: Least share of the floor, in percent, on an H200 in bfloat16: (shape, batch, context).
DECODE_TARGETS: Final[Mapping[tuple[str, int, int], float]] = {
    ("llama-3.1-8b", 1, 2048): 85,
    ("llama-3.1-8b", 64, 2048): 80,
    ("qwen3-4b", 1, 2048): 75,
    ("llama-3.2-1b", 1, 2048): 65,
    ("qwen3-0.6b", 1, 2048): 45,
}
#: The same of prefills: (shape, tokens).
PREFILL_TARGETS: Final[Mapping[tuple[str, int], float]] = {("llama-3.1-8b", 8192): 60}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The work. Floors are of this device's own copy and product, unless they are given."""

    #: None given: all of them on a GPU; a CPU gets a smoke run.
    shapes: Sequence[str] = ()
    batches: Sequence[int] = (1, 64)
    #: Tokens behind each row of a decode step, or tokens of a prompt.
    contexts: Sequence[int] = (512, 2048, 8192)
    steps: int = 40
    #: Prefills of each length.
    repeat: int = 3
    #: Query tokens of a step at most, as the engine's option.
    max_step_tokens: int = 2048
    #: How weights and KV are held, as the engine's options. Targets are of plain ones.
    weights: Weights = "plain"
    kv: KV = "plain"
    device: str = "auto"
    #: Bytes, and operations, a second.
    bandwidth: float | None = None
    flops: float | None = None
    #: A smoke run on the tiny shape; its figures mean nothing.
    quick: bool = False

    def points(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Shapes, each with its (batch, context)."""
        if self.quick:
            yield TINY, [(1, 40), (4, 100)]
            return
        for shape in self.shapes or FULL_SHAPES:
            most = int(shape_json(shape)["max_position_embeddings"]) - self.steps - 16
            pairs = [(b, c) for b in self.batches for c in self.contexts if c <= most]
            yield shape, pairs

    def tokens(self, batch: int, context: int) -> int:
        """Of KV that a point needs: to whole blocks, and the next one."""
        return batch * (-(-(context + self.margin) // 16) + 1) * 16

    @property
    def plain(self) -> bool:
        return self.weights == self.kv == "plain"

    @property
    def margin(self) -> int:
        """Tokens that a sequence grows by at most."""
        return self.steps + 32


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Milliseconds of a decode step, or of a prefill."""

    shape: str
    batch: int
    context: int
    ms: float
    #: The 90th percentile, which of few prefills is the slowest.
    p90: float
    floor_ms: float
    target: float | None
    #: What `asyncinfer doctor` finds of the products alone, on a CPU.
    products_ms: float | None = None

    @property
    def share(self) -> float:
        """Of the floor, in percent."""
        return 100 * self.floor_ms / self.ms


@dataclass(frozen=True, slots=True)
class StepResults:
    """All points of one kind."""

    kind: str
    ceilings: Ceilings
    points: tuple[StepPoint, ...]

    def figures(self) -> tuple[Figure, ...]:
        found = [*self.ceilings.figures()]
        for point in self.points:
            rows = f"batch {point.batch}, context" if self.kind == "decode" else "tokens"
            title = f"{point.shape} {self.kind}, {rows} {point.context}"
            found.append(Figure(title, point.ms, "ms", "lower"))
            share = Figure(f"{title}, of the floor", point.share, "%", "higher", point.target)
            found.append(share)
            if point.products_ms is not None:
                share_of_products = 100 * point.products_ms / point.ms
                found.append(Figure(f"{title}, products alone", share_of_products, "%", "higher"))
        return tuple(found)


def measure_decode(
    options: StepOptions,
    report: Callable[[str], None] = lambda _: None,
    *,
    ceilings: Ceilings | None = None,
    going_on: Callable[[], bool] = lambda: True,
) -> StepResults:
    """Medians of decode steps, greedy, on random weights. Stops early once `going_on` is false."""
    from asyncinfer.planner import decode_floor

    options, device, ceilings = _begun(options, report, ceilings)
    found: list[StepPoint] = []
    for shape, every in options.points():
        points = [point for point in every if _fits(shape, *point, options, device)]
        if len(points) < len(every):
            report(f"{shape}: {len(every) - len(points)} points do not fit on {device}")
        if not (points and going_on()):
            continue
        report(f"{shape}: weights")
        with opened_driver(shape, points, options) as driver:
            for batch, context in points:
                if not going_on():
                    break
                report(f"{shape}: decode, batch {batch}, context {context}")
                spent = driver.decode(batch, context, steps=options.steps)
                floor = decode_floor(
                    _size(shape),
                    ceilings.speed,
                    batch=batch,
                    context=context + options.steps // 2,
                    storage=_storage(shape, options, device),
                )
                target = DECODE_TARGETS.get((shape, batch, context)) if options.plain else None
                point = _point(shape, batch, context, spent, floor.seconds, device, target)
                # Right after the steps: what else the machine does is then the same for both.
                products = _products_ms(shape, batch, options, device)
                found.append(replace(point, products_ms=products))
    return StepResults("decode", ceilings, tuple(found))


def measure_prefill(
    options: StepOptions,
    report: Callable[[str], None] = lambda _: None,
    *,
    ceilings: Ceilings | None = None,
    going_on: Callable[[], bool] = lambda: True,
) -> StepResults:
    """Medians of prompts, alone and with nothing cached, until their first token."""
    from asyncinfer.planner import prefill_floor

    options, device, ceilings = _begun(options, report, ceilings)
    found: list[StepPoint] = []
    for shape, points in options.points():
        lengths = sorted({context for _, context in points})
        if not (lengths and going_on()):
            continue
        report(f"{shape}: weights")
        with opened_driver(shape, [(1, length) for length in lengths], options) as driver:
            for tokens in lengths:
                if not going_on():
                    break
                report(f"{shape}: prefill of {tokens}")
                driver.prefill(tokens)
                spent = [driver.prefill(tokens) for _ in range(options.repeat)]
                floor = prefill_floor(
                    _size(shape),
                    ceilings.speed,
                    tokens=tokens,
                    storage=_storage(shape, options, device),
                )
                target = PREFILL_TARGETS.get((shape, tokens)) if options.plain else None
                found.append(_point(shape, 1, tokens, spent, floor.seconds, device, target))
    return StepResults("prefill", ceilings, tuple(found))


@contextmanager
def opened_driver(
    shape: str, points: Sequence[tuple[int, int]], options: StepOptions
) -> Iterator[StepDriver]:
    """A runner of the shape with room for each of the points, one at a time."""
    import torch

    from asyncinfer.models import parse_config

    device = bench_device(options.device)
    tokens = max(options.tokens(*point) for point in points)
    config = EngineConfig(
        device=str(device),
        weights=options.weights,
        kv=options.kv,
        kv_bytes=tokens * _storage(shape, options, device).kv_bytes_per_token(_size(shape)),
        max_context=max(context for _, context in points) + options.margin,
        max_running=max(batch for batch, _ in points),
        max_step_tokens=options.max_step_tokens,
    )
    dtype = str(bench_dtype(device)).removeprefix("torch.")
    runner = RandomModel(parse_config(shape_json(shape)), dtype=dtype).load(config).runner
    try:
        yield StepDriver(runner, ahead=2 if device.type == "cuda" else 1)
    finally:
        runner.close()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _begun(
    options: StepOptions, report: Callable[[str], None], ceilings: Ceilings | None
) -> tuple[StepOptions, torch.device, Ceilings]:
    """What the device gets, and what it does at most."""
    device = bench_device(options.device)
    if device.type == "cpu" and not options.shapes:
        options = replace(options, quick=True)
    if ceilings is None and options.bandwidth and options.flops:
        ceilings = Ceilings(options.bandwidth, options.flops)
    if ceilings is None:
        report("copy bandwidth and matrix product")
        ceilings = measure_ceilings(device, quick=options.quick)
        ceilings = Ceilings(
            options.bandwidth or ceilings.bandwidth, options.flops or ceilings.flops
        )
    return options, device, ceilings


def _products_ms(
    shape: str, batch: int, options: StepOptions, device: torch.device
) -> float | None:
    """Of a step on a CPU, by the measurement of `asyncinfer doctor`; None where it has none."""
    from asyncinfer.doctor.products import product_times
    from asyncinfer.models import parse_config

    held = {"plain": "float32", "int8": "int8", "int4": "int4"}.get(options.weights)
    if device.type != "cpu" or held is None:
        return None
    (times,) = product_times(parse_config(shape_json(shape)), (batch,), kinds=(held,))
    return 1e3 * times.seconds[batch]


def _fits(shape: str, batch: int, context: int, options: StepOptions, device: torch.device) -> bool:
    """Whether a GPU has room for the weights and the point's KV, with a tenth for all else."""
    import torch

    if device.type != "cuda":
        return True
    size, storage = _size(shape), _storage(shape, options, device)
    kv = options.tokens(batch, context) * storage.kv_bytes_per_token(size)
    _, total = torch.cuda.mem_get_info(device)
    return storage.weight_bytes(size) + kv < 0.9 * total


def _size(shape: str) -> ModelSize:
    from asyncinfer.models import parse_config
    from asyncinfer.planner import ModelSize

    return ModelSize.of(parse_config(shape_json(shape)))


def _storage(shape: str, options: StepOptions, device: torch.device) -> Storage:
    from asyncinfer.planner import Format

    held = Format(name="", linear=1.0 if options.weights == "int8" else None, kv=options.kv)
    return held.storage(str(bench_dtype(device)).removeprefix("torch."), _size(shape).head_dim)


def _point(
    shape: str,
    batch: int,
    context: int,
    spent: Sequence[float],
    floor: float,
    device: torch.device,
    target: float | None,
) -> StepPoint:
    late = sorted(spent)[math.ceil(0.9 * len(spent)) - 1]
    asked = target if is_h200(device) else None
    return StepPoint(shape, batch, context, 1e3 * median(spent), 1e3 * late, 1e3 * floor, asked)
