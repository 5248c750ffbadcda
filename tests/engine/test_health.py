"""`stats()` and `health()` while a step hangs."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from support import OpenEngine, TimedEngine, Until, places

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineDead,
    EngineHealth,
    EngineStats,
    ModelLoadError,
    Overloaded,
)
from asyncinfer.engine.admission import Admission
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio


async def test_what_is_held_while_a_step_hangs(
    open_engine: OpenEngine, gate: StepGate, until: Until
) -> None:
    async with open_engine(max_requests=6, max_running=2) as engine:
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.generate, "first")
            await until(lambda: gate.arrived == 1)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.steps) == (1, 0, 0)
            for index in range(5):
                group.start_soon(engine.generate, f"request {index}" + "x" * 1500 * (index % 2))
            await until(lambda: places(engine) == 6)
            for _ in range(3):
                with pytest.raises(Overloaded):
                    await engine.generate("one too many")
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.refused) == (1, 5, 3)
            report = engine.health()
            assert (report.state, report.serving, report.cause) == ("degraded", True, None)
            assert "max_requests=6" in report.reasons[0]
            group.cancel_scope.cancel()
            gate.open()
        # Two long prompts may still be with the workers.
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert engine.health() == EngineHealth("open")


async def test_what_has_ended_while_a_step_hangs(gate: StepGate, until: Until) -> None:
    """The watchdog has told a consumer of the end; the decode thread knows nothing of it yet."""
    model = FakeModel(gate=gate)
    async with TimedEngine(model, max_running=2, drain_timeout=0.0) as engine:
        gate.close()
        async with anyio.create_task_group() as group:

            async def fails(deadline: float, n: int = 1) -> None:
                with pytest.raises(DeadlineExceeded):
                    await engine.generate("x", max_tokens=9, deadline=deadline, n=n)

            group.start_soon(fails, 1.0, 3)
            await until(lambda: gate.arrived == 1)
            group.start_soon(fails, 2.0)
            await until(lambda: places(engine) == 4)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.failed) == (2, 2, 0)
            engine.time.go_by(1.5)
            await until(lambda: engine.stats().failed == 1)
            stats = engine.stats()
            assert (stats.running, stats.waiting) == (0, 1)
            engine.time.go_by(1.0)
            await until(lambda: engine.stats().failed == 2)
            stats = engine.stats()
            assert (stats.running, stats.waiting, gate.arrived) == (0, 0, 1)
            gate.open()
        await until(lambda: places(engine) == 0)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks_total)


async def test_what_the_decode_thread_ends_runs_until_it_counts_it_no_more(
    until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sees that nothing runs may count on free blocks."""
    seen: list[EngineStats] = []
    end = Admission.end

    def ending(admission: Admission, *about: Any, **counted: Any) -> object:
        outcome = end(admission, *about, **counted)
        if outcome is not None:
            seen.append(engine.stats())
        return outcome

    monkeypatch.setattr(Admission, "end", ending)
    async with Engine(FakeModel()) as engine:
        async with engine.stream("x", max_tokens=200, ignore_eos=True) as stream:
            await anext(stream)
        await until(lambda: places(engine) == 0)
    (stats,) = seen
    assert stats.running == 1
    assert stats.blocks_free < stats.blocks_total


async def test_a_step_that_takes_long(gate: StepGate, until: Until) -> None:
    async with TimedEngine(FakeModel(gate=gate), drain_timeout=0.0) as engine:
        gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.generate, "x")
            await until(lambda: gate.arrived == 1)
            engine.time.go_by(10.0)
            assert engine.health() == EngineHealth("open")
            engine.time.go_by(0.5)
            assert engine.health().state == "degraded"
            assert engine.health().reasons == ("a step has been running for 10.5 s",)
            group.cancel_scope.cancel()
            gate.open()
        await until(lambda: engine.health().state == "open")


class Broken:
    def rank(self, request: Any, now: float) -> tuple[float, ...]:
        raise OSError("planted")


async def test_a_plugin_that_misbehaves(open_engine: OpenEngine) -> None:
    async with open_engine(scheduler=Broken()) as engine:
        assert engine.health() == EngineHealth("open")
        await engine.generate("x", max_tokens=1)
        report = engine.health()
        assert report.state == "degraded"
        assert "Broken" in report.reasons[0]


async def test_from_the_beginning_to_the_end(gate: StepGate, until: Until) -> None:
    engine = Engine(FakeModel(gate=gate))
    assert engine.health() == EngineHealth("closed", ("it was not opened",))
    async with engine:
        assert engine.health() == EngineHealth("open")
        gate.close()
        gate.let()
        stream = engine.stream("x", max_tokens=100)
        await anext(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.aclose)
            await until(lambda: engine.health().state == "draining")
            assert "1 requests" in engine.health().reasons[0]
            assert not engine.health().serving
            gate.open()
    assert engine.health() == EngineHealth("closed", ("the engine was closed",))


async def test_dead() -> None:
    def explode(phase: str, plan: object) -> None:
        raise OSError("the device fell off")

    engine = await Engine.open(FakeModel(gate=explode))
    with pytest.raises(EngineDead):
        await engine.generate("x")
    report = engine.health()
    assert (report.state, report.serving) == ("dead", False)
    assert isinstance(report.cause, OSError)
    assert "the device fell off" in report.reasons[0]
    await engine.aclose()

    unloaded = Engine(FakeModel(load_error=ModelLoadError("is cut")))
    with pytest.raises(ModelLoadError):
        await unloaded.__aenter__()
    assert unloaded.health().state == "dead"
    assert isinstance(unloaded.health().cause, ModelLoadError)
