"""Every wait for a request ends: by its deadline, a close or a death, whatever the engine does.

Nothing here lets the engine go on before the wait has ended: where nobody ended it, the test's own
limit does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import anyio
import pytest
from support import TimedEngine, Until, admission_of, core_of, places, thread_of

from asyncinfer import DeadlineExceeded, Engine, EngineClosed, EngineDead
from asyncinfer.engine import closing
from asyncinfer.engine.loop_bridge import Batch, LoopBridge
from asyncinfer.engine.preparer import Preparer
from asyncinfer.engine.stream_buffer import Outcome, StreamBuffer
from asyncinfer.protocols import Observer, ObserverEvent, RequestSubmitted
from asyncinfer.testing import FakeModel, InlineEngine, StepGate

pytestmark = pytest.mark.anyio

LONG_PROMPT = "x" * 1500


class Hang:
    """Something of the engine that does not come back until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.let_go.wait(120)


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.let_go.set()


class HangingObserver(Observer):
    thread: ClassVar[Literal["own", "decode"]] = "decode"

    def __init__(self, hang: Hang) -> None:
        self.hang = hang

    def observe(self, event: ObserverEvent) -> None:
        if isinstance(event, RequestSubmitted):
            self.hang()


class HangingPolicy:
    """A scheduling policy."""

    def __init__(self, hang: Hang) -> None:
        self.hang = hang

    def rank(self, request: Any, now: float) -> tuple[float, ...]:
        self.hang()
        return (0.0,)


#: What keeps the decode thread from going on.
ON_THE_THREAD = ["step", "collect", "observer", "policy"]


@pytest.fixture(params=[*ON_THE_THREAD, "template"])
def stuck(
    request: pytest.FixtureRequest, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Opens an engine that hangs at one point or another as soon as it is given a request."""
    where = request.param

    def gate(phase: str, plan: Any) -> None:
        if phase == {"step": "launch", "collect": "collect"}.get(where):
            hang()

    prepare = Preparer.prepare

    def held(*arguments: Any) -> None:
        hang()
        prepare(*arguments)

    if where == "template":
        monkeypatch.setattr(Preparer, "prepare", held)

    async def opened(kind: type[Engine] = Engine, **config: Any) -> tuple[Engine, list[str]]:
        if where == "observer":
            config["observers"] = [HangingObserver(hang)]
        elif where == "policy":
            config["scheduler"] = HangingPolicy(hang)
        engine = await kind.open(FakeModel(gate=gate), **config)
        if where == "template":
            # One for each worker, and one that waits for them.
            return engine, [LONG_PROMPT] * 3
        # One in the step, one in the inbox, and one that a worker prepares first.
        return engine, ["x", "y", LONG_PROMPT]

    return opened


async def finish(engine: Engine, hang: Hang, until: Until) -> None:
    """Let go, and see that nothing is left."""
    hang.let_go.set()
    await until(lambda: places(engine) == 0)
    await engine.aclose(drain_timeout=0.0)
    assert not core_of(engine).requests.live
    assert not admission_of(engine).untold()


# fault 17
async def test_a_deadline_passes(stuck: Callable[..., Any], hang: Hang, until: Until) -> None:
    engine, prompts = await stuck(TimedEngine)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:

            async def late(prompt: str) -> None:
                with pytest.raises(DeadlineExceeded, match="deadline passed after"):
                    await engine.generate(prompt, deadline=0.05)

            group.start_soon(late, prompts[0])
            await until(hang.reached.is_set)
            for prompt in prompts[1:]:
                group.start_soon(late, prompt)
            await until(lambda: places(engine) == 3)
            engine.time.go_by(1.0)
        assert engine.stats().failed == 3
    await finish(engine, hang, until)
    assert engine.stats().failed == 3


# fault 17
async def test_a_stream_that_was_read_from(until: Until, gate: StepGate) -> None:
    gate.close()
    async with TimedEngine(FakeModel(gate=gate), drain_timeout=0.0) as engine:
        stream = engine.stream("x", max_tokens=100, deadline=0.2, temperature=0.0)
        gate.let()
        await anext(stream)
        gate.wait_arrived(2)
        engine.time.go_by(1.0)
        with anyio.fail_after(120), pytest.raises(DeadlineExceeded):
            async for _ in stream:
                pass
        # The step still computes it, but the request is over.
        assert (places(engine), engine.stats().running) == (1, 0)
        gate.open()
        await until(lambda: places(engine) == 0)
        with pytest.raises(DeadlineExceeded):
            await anext(stream)


# faults 11, 17
async def test_a_close(
    stuck: Callable[..., Any], hang: Hang, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = await stuck()
    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:

            async def closed(prompt: str) -> None:
                with pytest.raises(EngineClosed, match=r"clos(ed|ing)"):
                    await engine.generate(prompt)

            group.start_soon(closed, prompts[0])
            await until(hang.reached.is_set)
            for prompt in prompts[1:]:
                group.start_soon(closed, prompt)
            await until(lambda: places(engine) == 3)
            if prompts[0] == LONG_PROMPT:
                # A worker that prepares a prompt: nobody waits for that.
                await engine.aclose(drain_timeout=0.0)
            else:
                monkeypatch.setattr(closing, "CLOSE_GRACE", 0.2)
                with pytest.raises(EngineDead, match=r"did not stop within \d+\.\d s"):
                    await engine.aclose(drain_timeout=0.0)
    await finish(engine, hang, until)


# faults 16, 17
@pytest.mark.parametrize("stuck", ON_THE_THREAD, indirect=True)
async def test_a_death(stuck: Callable[..., Any], hang: Hang, until: Until) -> None:
    engine, prompts = await stuck(TimedEngine, step_timeout=1.0)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:

            async def dead(prompt: str) -> None:
                with pytest.raises(EngineDead, match=r"longer than 1 s"):
                    await engine.generate(prompt)

            group.start_soon(dead, prompts[0])
            await until(hang.reached.is_set)
            for prompt in prompts[1:]:
                group.start_soon(dead, prompt)
            await until(lambda: places(engine) == 3)
            engine.time.go_by(2.0)
        stats = engine.stats()
        assert stats.running == stats.waiting == places(engine) == 0
        with pytest.raises(EngineDead, match=r"longer than 1 s"):
            await engine.aclose()
    hang.let_go.set()
    await until(lambda: not thread_of(engine).alive)
    await finish(engine, hang, until)


@pytest.mark.parametrize("kind", ["observer", "policy"])
async def test_the_death_names_the_call(kind: str, hang: Hang, until: Until) -> None:
    config: dict[str, Any] = (
        {"observers": [HangingObserver(hang)]}
        if kind == "observer"
        else {"scheduler": HangingPolicy(hang)}
    )
    engine = await TimedEngine.open(FakeModel(), step_timeout=1.0, **config)
    named = "HangingObserver" if kind == "observer" else "HangingPolicy"

    async def dead() -> None:
        with pytest.raises(EngineDead, match=rf"longer than 1 s.*{named}") as at:
            await engine.generate("x")
        # The stack.
        assert "hang()" in str(at.value)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            group.start_soon(dead)
            await until(hang.reached.is_set)
            engine.time.go_by(2.0)
    hang.let_go.set()
    await until(lambda: not thread_of(engine).alive)


async def test_leaving_a_stream_that_is_cancelled_waits_for_no_step(gate: StepGate) -> None:
    """Its task hears of the end of its time, and not of the end of the step."""
    async with Engine(FakeModel(gate=gate), drain_timeout=0.0) as engine:
        async with engine.stream("x", max_tokens=100) as other:
            await anext(other)
            gate.close()
            with anyio.fail_after(120):
                with anyio.move_on_after(0.05):
                    async with engine.stream("y") as stream:
                        await anext(stream)
            gate.open()


async def test_a_stream_that_is_begun_again_keeps_its_deadline(
    hang: Hang, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader that has a timeout of its own around each chunk could wait for ever."""
    monkeypatch.setattr(Preparer, "prepare", hang)
    async with TimedEngine(FakeModel(), drain_timeout=0.0) as engine:
        stream = engine.stream(LONG_PROMPT, deadline=1.0)
        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                group.start_soon(anext, stream)
                await until(hang.reached.is_set)
                group.cancel_scope.cancel()
            engine.time.go_by(0.6)

            async def read_on() -> None:
                with pytest.raises(DeadlineExceeded, match=r"passed after 1\."):
                    await anext(stream)

            async with anyio.create_task_group() as group:
                group.start_soon(read_on)
                await until(lambda: places(engine) == 2)
                engine.time.go_by(0.6)
        hang.let_go.set()


async def test_a_close_tells_a_loop_once_of_all_that_are_prepared(
    hang: Hang, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preparer, "prepare", hang)
    news: list[int] = []
    send = LoopBridge.send

    def counting(self: LoopBridge, batch: Batch) -> None:
        news.append(len(batch.news))
        send(self, batch)

    monkeypatch.setattr(LoopBridge, "send", counting)
    engine = await Engine.open(FakeModel())
    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:

            async def closed_under() -> None:
                with pytest.raises(EngineClosed):
                    await engine.generate(LONG_PROMPT)

            for _ in range(20):
                group.start_soon(closed_under)
            await until(lambda: places(engine) == 20)
            await engine.aclose(drain_timeout=0.0)
    assert 20 in news
    hang.let_go.set()


async def test_what_a_step_delivers_after_the_end_is_dropped() -> None:
    engine = InlineEngine(FakeModel())
    stream = engine.submit([1, 2, 3], max_tokens=5, deadline=1.0)
    engine.pump(2)
    # The watchdog, while a step runs.
    outcome = Outcome(DeadlineExceeded("late"))
    stream.request.buffer.bridge.send(Batch((stream.request.buffer, outcome)))
    read = len(stream.read())
    engine.run()
    assert stream.read() == []
    assert len(stream.chunks) == read == 2
    assert stream.error is outcome.error


async def test_a_chunk_that_was_half_put_when_the_engine_died() -> None:
    engine = InlineEngine(FakeModel())
    box = StreamBuffer(engine.bridge)
    box.put(("whole", (1,), None, 0, None, None))
    # What `put` has done when the watchdog looks.
    engine.bridge.batch.buffers.append(box)
    engine.bridge.rescue()
    engine.bridge.send(Batch((box, Outcome(EngineDead("hung")))))
    box.put(("late", (2,), None, 0, None, None))
    engine.bridge.flush()
    assert [chunk[0] for chunk in box.chunks] == ["whole"]
