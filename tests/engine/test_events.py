"""The engine tells its log about loading, admission, preemption, ends and death."""

from __future__ import annotations

import contextvars
import logging

import anyio
import pytest
from structlog.contextvars import bound_contextvars
from support import Until, places

from asyncinfer import Engine, EngineDead, Overloaded, Stream
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio


async def test_events(caplog: pytest.LogCaptureFixture, gate: StepGate, until: Until) -> None:
    caplog.set_level(logging.DEBUG, "asyncinfer")
    async with Engine(FakeModel(blocks=12, gate=gate), max_requests=2) as engine:
        gate.close()
        with bound_contextvars(user="u1"):
            first = engine.stream("a" * 20, max_tokens=120, temperature=0.0)
            second = engine.stream("b" * 20, max_tokens=120, temperature=0.0)

            async def complete(stream: Stream) -> None:
                await stream

            async with anyio.create_task_group() as group:
                group.start_soon(complete, first)
                group.start_soon(complete, second)
                # Both are there before the first is done: one has to give way.
                await until(lambda: places(engine) == 2)
                gate.open()
        async with engine.stream("c", max_tokens=100, temperature=0.0, buffer=4) as left:
            await anext(left)
            with pytest.raises(Overloaded):
                async with (
                    engine.stream("d", max_tokens=150, temperature=0.0, buffer=4),
                    engine.stream("e"),
                ):
                    raise AssertionError
    events = [record.asyncinfer for record in caplog.records]  # type: ignore[attr-defined]
    names = [event["event"] for event in events]
    assert names[0] == "engine_loaded"
    assert events[0]["model"] == "FakeModel"
    assert names[-1] == "engine_closed"
    assert names.count("request_finished") == 2
    assert names.count("request_aborted") == 2
    assert names.count("request_refused") == 1
    assert names.count("request_preempted") == engine.stats().preemptions > 0
    mine = [event for event in events if event.get("request_id") == first.request_id]
    assert mine[0]["event"] == "request_admitted"
    # In the caller's context, though another thread tells it.
    assert {event["user"] for event in mine} == {"u1"}


async def test_death_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def explode(phase: str, plan: object) -> None:
        raise OSError("gone")

    engine = await Engine.open(FakeModel(gate=explode))
    with pytest.raises(EngineDead):
        await engine.generate("x")
    await engine.aclose()
    assert "engine_dead cause=\"OSError('gone')\"" in caplog.text


async def test_the_engine_thread_runs_in_a_context_of_its_own() -> None:
    secret: contextvars.ContextVar[str] = contextvars.ContextVar("secret")
    seen: list[str | None] = []

    def look(phase: str, plan: object) -> None:
        seen.append(secret.get("nothing"))

    secret.set("of the caller")
    async with Engine(FakeModel(gate=look)) as engine:
        await engine.generate("x", max_tokens=2)
    assert set(seen) == {"nothing"}
