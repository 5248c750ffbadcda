"""`asyncinfer bench decode`, `prefill` and `kernels`, small: what is measured is what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.decode import (
    DECODE_TARGETS,
    PREFILL_TARGETS,
    StepOptions,
    _fits,
    measure_decode,
    measure_prefill,
    opened_driver,
)
from benchmarks.decode_kernels import kernel_cases
from benchmarks.kernels import KernelOptions, measure_kernels
from benchmarks.shapes import EXPERTS, FULL_SHAPES, SHAPES, TINY, TINY_EXPERTS, shape_json
from benchmarks.step_costs import idle_gaps, measure_step_costs
from benchmarks.step_driver import StepDriver

from asyncinfer.bench import BenchError
from asyncinfer.doctor import ProductTimes, products
from asyncinfer.doctor.products import product_times
from asyncinfer.kernels.device_clock import DeviceClock
from asyncinfer.models import parse_config
from asyncinfer.planner import ModelSize, Storage, decode_floor, prefill_floor
from asyncinfer.quantization import Linear, linear
from asyncinfer.quantization.int8 import Int8Linear
from asyncinfer.quantization.packed import PackedLinear
from asyncinfer.runner import replay_executor
from asyncinfer.testing import KVGroupSpec, RandomModel, RunnerSpec, Step
from asyncinfer.testing.strict_runner import StrictRunner

OPTIONS = StepOptions(
    quick=True, device="cpu", steps=6, repeat=2, max_step_tokens=32, bandwidth=2e9, flops=3e9
)
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-4b": 4_022_468_096,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
}


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_are_those_of_the_models(shape: str) -> None:
    assert ModelSize.of(parse_config(shape_json(shape))).parameters == PARAMETERS[shape]


def test_targets_are_of_points_that_are_measured() -> None:
    options = StepOptions()
    points = {(shape, *pair) for shape, pairs in options.points() for pair in pairs}
    assert set(DECODE_TARGETS) <= points
    assert set(PREFILL_TARGETS) <= {(shape, context) for shape, _, context in points}
    assert set(SHAPES) == {*PARAMETERS, TINY, TINY_EXPERTS, EXPERTS}
    assert set(FULL_SHAPES) == set(PARAMETERS)


def test_decode_is_measured_beside_the_planners_floor() -> None:
    told: list[str] = []
    found = measure_decode(OPTIONS, told.append)
    assert [(p.batch, p.context) for p in found.points] == [(1, 40), (4, 100)]
    size, four = ModelSize.of(parse_config(shape_json(TINY))), Storage(weights=4, linear=4, kv=4)
    for point in found.points:
        speed = Ceilings(2e9, 3e9).speed
        floor = decode_floor(
            size, speed, batch=point.batch, context=point.context + 3, storage=four
        )
        assert point.floor_ms == pytest.approx(1e3 * floor.seconds)
        assert 0 < point.ms <= point.p90
        assert point.target is None
    assert told[0] == "tiny: weights"
    names = [figure.name for figure in found.figures()]
    assert names[2:5] == [
        "tiny decode, batch 1, context 40",
        "tiny decode, batch 1, context 40, of the floor",
        "tiny decode, batch 1, context 40, products alone",
    ]


def test_the_doctor_times_what_a_step_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def noted(make: Callable[..., Linear]) -> Callable[..., Linear]:
        def made(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            layer, numbers = make(weight, bias), weight.numel()

            def product(x: torch.Tensor) -> torch.Tensor:
                read.append(numbers)
                return layer(x)

            return product

        return made

    # The calls of a recorded step are no layer's.
    monkeypatch.setattr(replay_executor, "_STEPS", math.inf)
    for name in ("plain", "floats"):
        monkeypatch.setitem(linear._FORMATS, name, noted(linear._FORMATS[name]))
    with opened_driver(TINY, [(1, 40)], OPTIONS) as opened:
        opened.decode(1, 40, steps=2)
        of_two_steps = sum(read)
        opened.decode(1, 40, steps=3)
    # Both had the same prompt.
    of_a_step = sum(read) - 2 * of_two_steps
    (times,) = product_times(parse_config(shape_json(TINY)), (1,), kinds=("float32",))
    assert times.bytes == 4 * of_a_step


def test_steps_are_held_against_the_doctors_products(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []

    def half(config: Any, rows: Any, *, kinds: Any) -> tuple[ProductTimes]:
        asked.append((rows, kinds))
        return (ProductTimes(held=kinds[0], bytes=1, seconds=dict.fromkeys(rows, 0.25)),)

    monkeypatch.setattr(products, "product_times", half)
    monkeypatch.setattr(StepDriver, "decode", lambda *_, **__: [0.5, 0.5])
    found = measure_decode(replace(OPTIONS, weights="int8"))
    # Each number of rows once: what is asked for twice is added up.
    assert asked == [((1,), ("int8",)), ((4,), ("int8",))]
    alone = [figure for figure in found.figures() if figure.name.endswith("products alone")]
    assert [(figure.value, figure.unit) for figure in alone] == [(50, "%")] * 2
    # The doctor has no FP8 on a CPU.
    fp8 = measure_decode(replace(OPTIONS, weights="fp8"))
    assert all(point.products_ms is None for point in fp8.points)


def test_a_cpus_ceilings_are_of_more_than_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 16 MB lies in them: it is up to three times as fast as memory."""
    copied: list[int] = []

    class Clock:
        def __init__(self, device: torch.device) -> None:
            pass

        def seconds(self, work: Callable[[], object]) -> float:
            tensors = [cell.cell_contents for cell in getattr(work, "__closure__", None) or ()]
            copied.extend(tensor.nbytes for tensor in tensors)
            return 1.0

    monkeypatch.setattr("asyncinfer.kernels.device_clock.DeviceClock", Clock)
    found = measure_ceilings(torch.device("cpu"))
    assert copied[:2] == [1 << 28] * 2
    assert (found.bandwidth, found.flops) == (1 << 29, 2 * 2048**3)


def test_formats_of_8_bits_have_floors_of_their_own() -> None:
    small = replace(OPTIONS, weights="int8", kv="fp8")
    size = ModelSize.of(parse_config(shape_json(TINY)))
    # A float32 scale beside every 16 numbers of KV.
    storage = Storage(weights=4, linear=1, kv=20 / 16)
    with opened_driver(TINY, [(1, 40)], small) as opened:
        (kv,) = opened.runner.kv  # type: ignore[attr-defined]
        held = sum(tensor.nbytes for tensor in kv.tensors)
        assert held == kv.num_blocks * 16 * storage.kv_bytes_per_token(size)
        layer = opened.runner.decoder.layers[0]  # type: ignore[attr-defined]
        assert isinstance(layer.attention.out.base, Int8Linear | PackedLinear)
    speed = Ceilings(2e9, 3e9).speed
    for point in measure_decode(small).points:
        floor = decode_floor(
            size, speed, batch=point.batch, context=point.context + 3, storage=storage
        )
        assert point.floor_ms == pytest.approx(1e3 * floor.seconds)


def test_prefill_is_measured_beside_the_planners_floor() -> None:
    found = measure_prefill(OPTIONS)
    assert [p.context for p in found.points] == [40, 100]
    size, four = ModelSize.of(parse_config(shape_json(TINY))), Storage(weights=4, linear=4, kv=4)
    floor = prefill_floor(size, Ceilings(2e9, 3e9).speed, tokens=40, storage=four)
    assert found.points[0].floor_ms == pytest.approx(1e3 * floor.seconds)


def test_a_cpu_gets_a_smoke_run_unless_a_shape_is_asked_for() -> None:
    options = StepOptions(device="cpu", steps=6, bandwidth=2e9, flops=3e9)
    assert {point.shape for point in measure_decode(options).points} == {TINY}
    options = replace(options, shapes=(TINY,), contexts=(24,))
    assert [(p.batch, p.context) for p in measure_decode(options).points] == [(1, 24), (64, 24)]


def test_it_stops_when_the_time_is_over() -> None:
    turns = iter([True, True, False])
    found = measure_decode(OPTIONS, going_on=lambda: next(turns))
    assert len(found.points) == 1


def driver(**changes: Any) -> tuple[StepDriver, list[Step]]:
    spec: dict[str, Any] = {
        "groups": (KVGroupSpec(64),),
        "max_slots": 4,
        "max_context": 256,
        "max_step_tokens": 32,
    }
    plans: list[Step] = []
    runner = StrictRunner(
        RunnerSpec(block_size=16, vocab_size=256, **{**spec, **changes}),
        gate=lambda phase, plan: plans.append(plan) if phase == "launch" else None,
    )
    return StepDriver(runner, ahead=2), plans


def test_the_driver_plans_what_a_scheduler_would() -> None:
    """The fake runner reads every KV entry of every row through its table, and fails for any that
    was not written; it draws what it must only if all of them are right."""
    made, plans = driver()
    spent = made.decode(3, 70, steps=5, warmup=2)
    assert len(spent) == 5
    chunks = [plan for plan in plans if plan.counts and plan.counts[0] > 1]
    assert [plan.counts for plan in chunks] == [[32], [32], [6]]
    assert [len(plan.joins) for plan in plans] == [1, 0, 0, 1, 1, *[0] * 7]
    steps = [plan for plan in plans if plan.samples == [1, 1, 1]]
    assert [plan.starts for plan in steps] == [[70 + n] * 3 for n in range(7)]
    # Row by row: a step's copies are held twice for a moment.
    copies = [sum(len(group.copies) for group in plan.groups) for plan in plans]
    assert copies == [0, 0, 0, 5, 5, *[0] * 7]
    plans.clear()
    assert made.prefill(70) > 0
    assert sum(plan.tokens for plan in plans) == 70
    assert [plan.leaves for plan in plans] == [[0, 1, 2], [], []]
    assert sum(map(sum, (plan.samples for plan in plans))) == 1


def test_the_driver_refuses_what_does_not_fit() -> None:
    with pytest.raises(BenchError, match="num_blocks is 8, not 20"):
        driver(groups=(KVGroupSpec(8),))[0].decode(4, 70, steps=2)
    with pytest.raises(BenchError, match="max_slots is 1, not 2"):
        driver(max_slots=1)[0].decode(2, 20, steps=2)
    with pytest.raises(BenchError, match="max_context is 32"):
        driver(max_context=32)[0].prefill(40)


def test_a_row_that_fails_ends_the_measurement() -> None:
    made, _ = driver()
    made.runner.failing = lambda plan: {0: RuntimeError("nan")}  # type: ignore[attr-defined]
    with pytest.raises(BenchError, match="row 0 of a step failed: nan"):
        made.prefill(20)


def test_kernels_are_held_against_float64() -> None:
    found = measure_kernels(KernelOptions(quick=True, device="cpu"))
    assert {point.kernel for point in found.points} == {
        "rms_norm",
        "silu_mul",
        "linear_small",
        "grouped_linear",
        "int8_product",
        "rope_kv_write",
        "paged_attention",
        "sample",
    }
    for point in found.points:
        assert point.error < 1e-5
        assert point.us > 0
        assert point.floor_us > 0
    assert all(figure.met for figure in found.figures() if figure.target is not None)


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncinfer.kernels import ops

    right: Callable[..., torch.Tensor] = ops.silu_mul

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        return right(gate_up) * 1.01

    monkeypatch.setattr(ops, "silu_mul", wrong)
    found = measure_kernels(KernelOptions(quick=True, device="cpu"))
    failed = {point.kernel for point in found.points if point.error > point.tolerance}
    assert failed == {"silu_mul"}


def test_bytes_are_those_of_the_operands() -> None:
    config = parse_config(shape_json("qwen3-0.6b"))
    cpu = torch.device("cpu")
    cases = kernel_cases(config, batch=2, context=33, device=cpu, dtype=torch.bfloat16)
    by_title = {case.title: case for case in cases}
    down = by_title["linear_small down 2 x 3072 -> 1024"]
    # The residual is read, too.
    assert down.bytes == 2 * (3072 * 1024 + 2 * 3072 + 2 * 2 * 1024)
    smaller = by_title["linear_small int8 down 2 x 3072 -> 1024"]
    assert smaller.bytes == down.bytes - 3072 * 1024 + 4 * 1024
    assert down.flops == 2 * 2 * 3072 * 1024
    attention = by_title["paged_attention 2 x 16/8 x 128, context 33"]
    assert attention.bytes == 2 * 2 * 34 * 8 * 128 * 2 + 2 * 2 * 16 * 128 * 2 + 2 * 3 * 4


def test_points_that_a_gpu_has_no_room_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, options = torch.device("cuda", 0), StepOptions()
    points = [(1, 8192), (64, 2048), (64, 8192)]

    def fitting(gib: int) -> list[tuple[int, int]]:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, gib << 30))
        return [p for p in points if _fits("llama-3.1-8b", *p, options, cuda)]

    # 16 GB of weights, and 17 or 69 GB of KV.
    assert [fitting(141), fitting(80), fitting(24)] == [points, points[:2], points[:1]]
    assert _fits("llama-3.1-8b", 64, 8192, options, torch.device("cpu"))


def test_a_clock_times_what_it_is_given() -> None:
    clock = DeviceClock(torch.device("cpu"))
    runs: list[int] = []
    assert clock.seconds(lambda: runs.append(1), repeat=4, warmup=2) > 0
    assert len(runs) == 6


def test_gaps_between_spans() -> None:
    spans = [(0.0, 2.0), (1.0, 1.5), (5.0, 6.0), (6.0, 9.0), (10.0, 11.0)]
    assert idle_gaps(spans[::-1]) == [3.0, 1.0]
    assert idle_gaps([]) == []


def test_calls_into_torch_are_counted() -> None:
    found = measure_step_costs(TINY, 2, 40, OPTIONS)
    assert found.torch_calls >= 10
    assert found.torch_calls == math.floor(found.torch_calls)
    assert found.idle_us is None


def test_random_models_are_neither_zero_nor_wild() -> None:
    model = RandomModel(parse_config(shape_json(TINY)))
    with opened_driver(TINY, [(1, 40)], OPTIONS) as opened:
        assert opened.runner.spec.vocab_size == model.config.vocab_size
        decoder = opened.runner.decoder  # type: ignore[attr-defined]
        logits = decoder.logits(torch.randn(4, 64))
        assert 0.01 < logits.std() < 10
        layer = decoder.layers[0]
        assert layer is not decoder.layers[1]
