"""Observers: what they are told, in which order, where, and that they harm nobody."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar

import anyio
import pytest
from support import OpenEngine, TimedEngine, Until, core_of, oracle, places, thread_of

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineDead,
    EngineStats,
    ModelLoadError,
    PluginError,
    RequestFailed,
)
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.preparer import Preparer
from asyncinfer.engine.watchdog import Watchdog
from asyncinfer.plugins import observers
from asyncinfer.plugins.supervision import Limits
from asyncinfer.protocols import (
    EngineEnded,
    EngineOpened,
    EventsDropped,
    FirstToken,
    Observer,
    ObserverEvent,
    RequestEnded,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    StepTaken,
)
from asyncinfer.runtime import Threads
from asyncinfer.telemetry import GuardedObserver, Observers, observer_thread
from asyncinfer.telemetry.direct_observer import DirectObserver
from asyncinfer.testing import FakeModel, InlineEngine, StepGate

pytestmark = pytest.mark.anyio

E = TypeVar("E")


class Recorder(Observer):
    """Keeps what it is told, and the thread it is told on."""

    def __init__(self) -> None:
        self.events: list[ObserverEvent] = []
        self.threads: set[str] = set()
        self.closed = 0

    def observe(self, event: ObserverEvent) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def about(self, request_id: str) -> list[str]:
        """Names of the events of one request."""
        return [
            type(event).__name__
            for event in self.events
            if getattr(event, "request_id", None) == request_id
        ]


class DecodeRecorder(Recorder):
    thread: ClassVar[Literal["own", "decode"]] = "decode"


class StepRecorder(Recorder):
    every_step: ClassVar[bool] = True


class Raiser(Recorder):
    """Raises at some of its calls."""

    def __init__(self, at: Iterable[int]) -> None:
        super().__init__()
        self.at = set(at)

    def observe(self, event: ObserverEvent) -> None:
        super().observe(event)
        if len(self.events) - 1 in self.at:
            raise OSError(f"disk full at {len(self.events) - 1}")


class Stuck(Recorder):
    """Hangs in its first call, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()
        self.let_go = threading.Event()

    def observe(self, event: ObserverEvent) -> None:
        super().observe(event)
        self.hangs.set()
        assert self.let_go.wait(120)


OBSERVERS = import_module("asyncinfer.telemetry.observers")
USUAL = {name: getattr(OBSERVERS, name) for name in ("CLOSE_SECONDS", "HANGS_SECONDS")}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for observers as long as they take, unless a test says otherwise."""
    monkeypatch.setattr("asyncinfer.telemetry.observers.CLOSE_SECONDS", 60.0)
    monkeypatch.setattr("asyncinfer.telemetry.observers.HANGS_SECONDS", 60.0)


def observer_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "asyncinfer-observer"}


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """What was reported of plugins."""
    caplog.set_level(logging.DEBUG, "asyncinfer")

    def found(name: str = "plugin_failed") -> list[dict[str, Any]]:
        events = [record.asyncinfer for record in caplog.records]  # type: ignore[attr-defined]
        return [event for event in events if event["event"] == name]

    return found


@pytest.mark.parametrize("kind", [Recorder, DecodeRecorder])
async def test_the_life_of_a_request(kind: type[Recorder], open_engine: OpenEngine) -> None:
    recorder = kind()
    async with open_engine(observers=[recorder]) as engine:
        stream = engine.stream("hello", max_tokens=5, temperature=0.0, cache_scope="a", priority=3)
        done = await stream
    life = ["RequestSubmitted", "RequestStarted", "FirstToken", "RequestEnded"]
    assert recorder.about(stream.request_id) == life
    assert [type(event).__name__ for event in recorder.events] == [
        "EngineOpened",
        *life,
        "EngineEnded",
    ]
    assert recorder.closed == 1
    (opened,) = recorder.of(EngineOpened)
    assert opened.model == "FakeModel"
    (submitted,) = recorder.of(RequestSubmitted)
    assert (submitted.prompt_tokens, submitted.params.max_tokens) == (5, 5)
    assert (submitted.cache_scope, submitted.priority) == ("a", 3)
    (ended,) = recorder.of(RequestEnded)
    assert (ended.outcome, ended.finish_reasons, ended.error) == ("finished", ("length",), None)
    assert (ended.usage, ended.timings) == (done.usage, done.timings)
    (started,) = recorder.of(RequestStarted)
    (first,) = recorder.of(FirstToken)
    assert first.time - submitted.time == pytest.approx(done.timings.ttft)
    assert started.time - submitted.time == pytest.approx(done.timings.queued)
    times = [event.time for event in recorder.events]
    assert times == sorted(times)
    assert recorder.of(EngineEnded) == [EngineEnded(times[-1], None)]


async def test_it_is_told_on_a_thread_of_its_own(open_engine: OpenEngine) -> None:
    here, own, decode = threading.current_thread().name, Recorder(), DecodeRecorder()
    async with open_engine(observers=[own, decode]) as engine:
        await engine.generate("hello", max_tokens=3)
    assert own.threads == {"asyncinfer-observer"} != {here}
    assert decode.threads == {"asyncinfer-decode"}


async def test_without_observers_nothing_is_there(open_engine: OpenEngine) -> None:
    before = observer_threads()
    async with open_engine() as engine:
        await engine.generate("hello", max_tokens=3)
        assert core_of(engine).events is None
        assert observer_threads() <= before


async def test_counters_can_be_asked_for_anywhere(open_engine: OpenEngine) -> None:
    recorder = Recorder()
    async with open_engine(observers=[recorder]) as engine:
        await engine.generate("hello", max_tokens=3)
        stats = engine.stats()
    (opened,) = recorder.of(EngineOpened)
    assert opened.stats().generated_tokens == stats.generated_tokens == 3
    del engine
    assert isinstance(opened.stats(), EngineStats)


async def test_how_requests_end(open_engine: OpenEngine, gate: StepGate, until: Until) -> None:
    recorder = Recorder()
    async with open_engine(kind=TimedEngine, observers=[recorder], max_running=2) as engine:
        gate.close()
        left = engine.stream("left", max_tokens=1000, buffer=2)
        stopped = engine.stream("stopped", max_tokens=100, buffer=2)
        late = engine.stream("late", max_tokens=100, deadline=1.0)
        both = engine.stream("both", max_tokens=2, n=2)
        open_still = engine.stream("open", max_tokens=1000, buffer=2)
        for stream in (left, stopped, late, both, open_still):
            await stream.__aenter__()
        # The decode thread has taken in all of them by its second step.
        gate.let()
        await until(lambda: gate.arrived == 2)
        engine.time.go_by(2.0)
        gate.open()
        await left.aclose()
        await anext(stopped)
        stopped.stop()
        await both
        await until(lambda: len({event.request_id for event in recorder.of(RequestEnded)}) == 4)
    ends = {event.request_id: event for event in recorder.of(RequestEnded)}
    assert len(ends) == len(recorder.of(RequestEnded)) == 5
    assert ends[left.request_id].outcome == "aborted"
    assert ends[left.request_id].finish_reasons == (None,)
    assert ends[stopped.request_id].finish_reasons == ("stopped",)
    assert ends[both.request_id].finish_reasons == ("length", "length")
    failed = ends[late.request_id]
    assert (failed.outcome, failed.error) == ("failed", "DeadlineExceeded")
    assert "deadline passed" in failed.message
    closed = ends[open_still.request_id]
    assert (closed.outcome, closed.error) == ("closed", "EngineClosed")


@pytest.mark.parametrize("ends", ["deadline", "close", "leaves"])
async def test_one_that_ends_while_it_is_prepared(
    ends: str, open_engine: OpenEngine, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine took it in, and nobody knows yet how long its prompt is."""
    prepare, go_on, recorder = Preparer.prepare, threading.Event(), Recorder()

    def late(*arguments: Any) -> None:
        assert go_on.wait(120)
        prepare(*arguments)

    monkeypatch.setattr(Preparer, "prepare", late)
    async with open_engine(observers=[recorder]) as engine:
        deadline = 1e-3 if ends == "deadline" else None
        stream = engine.stream("x" * 2000, n=2, cache_scope="a", deadline=deadline)

        async def consume() -> None:
            with contextlib.suppress(DeadlineExceeded, EngineClosed):
                await stream

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            if ends != "deadline":
                await until(lambda: places(engine) == 2)
                await (engine if ends == "close" else stream).aclose()
        go_on.set()
    assert recorder.about(stream.request_id) == ["RequestSubmitted", "RequestEnded"]
    (submitted,) = recorder.of(RequestSubmitted)
    assert (submitted.prompt_tokens, submitted.cache_scope) == (0, "a")
    (ended,) = recorder.of(RequestEnded)
    assert ended.outcome == {"deadline": "failed", "close": "closed", "leaves": "aborted"}[ends]
    assert ended.finish_reasons == (None, None)


async def test_a_stream_that_is_begun_again_is_another_request(
    open_engine: OpenEngine, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first one may be told after the beginning of the second."""
    prepare, reached, go_on = Preparer.prepare, threading.Event(), threading.Event()
    recorder = Recorder()

    def first_late(*arguments: Any) -> None:
        if not reached.is_set():
            reached.set()
            assert go_on.wait(120)
        prepare(*arguments)

    monkeypatch.setattr(Preparer, "prepare", first_late)
    async with open_engine(observers=[recorder]) as engine:
        stream = engine.stream("x" * 2000, max_tokens=2)
        async with anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            await until(reached.is_set)
            group.cancel_scope.cancel()
        assert stream.request_id == "req-1"
        done = await stream
        go_on.set()
    assert done.request_id == stream.request_id == "req-1.2"
    assert recorder.about("req-1") == ["RequestSubmitted", "RequestEnded"]
    life = ["RequestSubmitted", "RequestStarted", "FirstToken", "RequestEnded"]
    assert recorder.about("req-1.2") == life
    outcomes = {event.request_id: event.outcome for event in recorder.of(RequestEnded)}
    assert outcomes == {"req-1": "aborted", "req-1.2": "finished"}


async def test_one_that_ends_before_the_decode_thread_has_it(
    open_engine: OpenEngine, gate: StepGate, until: Until
) -> None:
    recorder = Recorder()
    async with open_engine(observers=[recorder]) as engine:
        gate.close()
        async with engine.stream("x", max_tokens=2000):
            await until(lambda: gate.arrived)
            late = engine.stream("late", deadline=0.01)
            with pytest.raises(DeadlineExceeded):
                await late
            gate.open()
    assert recorder.about(late.request_id) == ["RequestSubmitted", "RequestEnded"]


async def test_preemption_is_told(gate: StepGate, until: Until) -> None:
    recorder = Recorder()
    async with Engine(FakeModel(blocks=12, gate=gate), observers=[recorder]) as engine:
        gate.close()
        async with anyio.create_task_group() as group:
            for letter in "ab":
                group.start_soon(
                    lambda letter: engine.generate(letter * 20, max_tokens=120, temperature=0.0),
                    letter,
                )
            # Both are there before the first is done.
            await until(lambda: places(engine) == 2)
            gate.open()
        preemptions = engine.stats().preemptions
    assert len(recorder.of(RequestPreempted)) == preemptions > 0
    for request_id in ("req-1", "req-2"):
        told = recorder.about(request_id)
        assert told[0] == "RequestSubmitted"
        assert told[-1] == "RequestEnded"
        assert told.count("RequestStarted") == told.count("FirstToken") == 1


async def test_steps_are_told_to_those_who_ask(open_engine: OpenEngine) -> None:
    plain, curious = Recorder(), StepRecorder()
    async with open_engine(observers=[plain, curious]) as engine:
        async with anyio.create_task_group() as group:
            for text in ("one", "two", "three"):
                group.start_soon(
                    lambda text: engine.generate(text, max_tokens=10, ignore_eos=True), text
                )
        stats = engine.stats()
    assert not plain.of(StepTaken)
    steps = curious.of(StepTaken)
    assert len(steps) == stats.steps
    assert sum(step.drawn_tokens for step in steps) == stats.generated_tokens == 30
    assert sum(step.query_tokens for step in steps) == 3 + 3 + 5 + 27
    # All but the first token of each have one before them.
    gaps = [gap for step in steps for gap in step.gaps]
    assert len(gaps) == 27
    assert min(gaps) > 0
    spans = {event.request_id: event for event in curious.of(RequestEnded)}
    decoding = sum(9 * event.timings.per_token for event in spans.values())
    assert sum(gaps) == pytest.approx(decoding)


async def test_the_callers_context_is_there(open_engine: OpenEngine) -> None:
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace")
    trace.set("abc")
    recorder = Recorder()
    async with open_engine(observers=[recorder]) as engine:
        await engine.generate("hello", max_tokens=2)
    (submitted,) = recorder.of(RequestSubmitted)
    assert submitted.context.run(trace.get) == "abc"


async def test_what_is_queued_is_told_before_the_end(open_engine: OpenEngine) -> None:
    recorder, before = Recorder(), observer_threads()
    async with open_engine(observers=[recorder]) as engine:
        async with anyio.create_task_group() as group:
            for index in range(100):
                group.start_soon(
                    lambda index: engine.generate(f"prompt {index}", max_tokens=3), index
                )
    # Nobody waited for the observer; closing did.
    assert len(recorder.of(RequestEnded)) == 100
    assert isinstance(recorder.events[-1], EngineEnded)
    assert recorder.closed == 1
    assert observer_threads() <= before


async def test_one_that_raises_is_reported_once_and_goes_on(
    open_engine: OpenEngine, faults: Any
) -> None:
    raiser, recorder = Raiser({1, 3, 4}), Recorder()
    async with open_engine(observers=[raiser, recorder]) as engine:
        for _ in range(3):
            tokens = (await engine.generate("hello", max_tokens=4, temperature=0.0)).token_ids
            assert list(tokens) == oracle(engine, "hello", 4)
    assert len(recorder.events) == len(raiser.events) == 14
    (fault,) = faults()
    assert fault["group"] == "asyncinfer.observers"
    assert "Raiser" in fault["error"]
    assert "disk full at 1" in fault["error"]


@pytest.mark.parametrize("thread", ["own", "decode"])
async def test_one_that_always_raises_is_called_no_more(
    thread: str, open_engine: OpenEngine, faults: Any
) -> None:
    raiser = Raiser(range(100))
    raiser.thread = thread  # type: ignore[misc, assignment]
    async with open_engine(observers=[raiser]) as engine:
        for _ in range(3):
            await engine.generate("hello", max_tokens=4)
    assert len(raiser.events) == 3
    assert raiser.closed == 1
    first, second = faults()
    assert "disk full at 0" in first["error"]
    assert "observe() raised 3 times in a row; it is not called any more" in second["error"]


async def test_one_that_leaves_the_interpreter_does_not(
    open_engine: OpenEngine, faults: Any
) -> None:
    class Leaver(Recorder):
        def observe(self, event: ObserverEvent) -> None:
            raise SystemExit(3)

        def close(self) -> None:
            raise SystemExit(4)

    async with open_engine(observers=[Leaver()]) as engine:
        await engine.generate("hello", max_tokens=4)
    assert any("close() raised: SystemExit(4)" in fault["error"] for fault in faults())


async def test_one_that_hangs_holds_nobody_up(
    open_engine: OpenEngine,
    until: Until,
    faults: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer_thread, "MOST_EVENTS", 10)
    monkeypatch.setattr("asyncinfer.telemetry.observers.CLOSE_SECONDS", 0.2)
    stuck, recorder = Stuck(), Recorder()
    async with open_engine(observers=[stuck, recorder]) as engine:
        await until(stuck.hangs.is_set)
        for index in range(5):
            await engine.generate("hello", max_tokens=4)
            # The other one keeps up, so that nothing of its is dropped.
            await until(lambda: len(recorder.events) == 5 + 4 * index)  # noqa: B023
    assert len(recorder.of(RequestEnded)) == 5
    assert not recorder.of(EventsDropped)
    # Where the machine is slow, the other one may not be done within that time either.
    reports = [fault["error"] for fault in faults() if "Stuck" in fault["error"]]
    assert len(reports) == 2
    assert "is too slow: events are dropped" in reports[0]
    assert "is left behind" in reports[1]
    (dropped,) = faults("events_dropped")
    # 21 were told: the first hangs, ten wait.
    assert dropped["count"] == 10
    stuck.let_go.set()
    await until(lambda: stuck.closed)
    assert stuck.of(EventsDropped) == [EventsDropped(stuck.of(EventsDropped)[0].time, 10)]
    assert isinstance(stuck.events[-1], EngineEnded)


def test_a_close_waits_for_one_that_works_and_not_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in USUAL.items():
        monkeypatch.setattr(OBSERVERS, name, seconds)

    class Joined:
        """A thread in which so many more calls return, one in each wait for it. Below 0: -3 is two
        calls that return, and one that never does."""

        ident = None

        def __init__(self, worker: Any, calls: int) -> None:
            self.worker = worker
            self.calls = calls

        def is_alive(self) -> bool:
            return self.calls != 0

        def join(self, timeout: float | None = None) -> None:
            time.now += timeout or 0.0
            if self.calls != -1:
                self.calls -= 1 if self.calls > 0 else -1
                self.worker.returned += 1

    class Time:
        def __init__(self, *calls: int) -> None:
            self.now = 0.0
            self._calls = [*calls]

        def clock(self) -> float:
            return self.now

        def start(self, worker: Any) -> Joined:
            return Joined(worker, self._calls.pop(0))

    # Eight looks a second: one that hangs has a second from its last call that returned.
    for calls, seconds in (
        ((1, 1), 0.125),
        ((-1, 3), 1.0),
        ((-1, 10), 1.25),
        ((-4, -1), 1.375),
        ((-1, 99), 1.5),
    ):
        time = Time(*calls)
        told = Observers([(Recorder(), "one"), (Recorder(), "other")], time)
        told.start()
        told.close(EngineEnded(0.0, None))
        assert time.now == seconds, calls


async def test_observers_that_work_after_a_close_are_no_step_that_hangs(
    until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()
    engine = await Engine.open(FakeModel(), observers=[stuck], step_timeout=5.0)
    await until(stuck.hangs.is_set)
    thread = thread_of(engine)
    stop, watching = Watchdog.stop, threading.Event()

    def stopped(self: Watchdog) -> None:
        stop(self)
        watching.set()

    monkeypatch.setattr(Watchdog, "stop", stopped)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.aclose)
        await until(lambda: watching.is_set() or thread.hung is not None)
        stuck.let_go.set()
    assert thread.hung is None
    assert stuck.closed == 1


def test_one_of_the_decode_thread_is_told_nothing_after_its_close() -> None:
    recorder = DecodeRecorder()
    direct = DirectObserver(GuardedObserver(recorder, "recorder"))
    direct.close(EngineEnded(1.0, None))
    # By the decode thread, when it was given up a moment before.
    direct.tell(RequestStarted(0.0, "req-1"))
    direct.close(EngineEnded(2.0, None))
    direct.hand_over()
    assert recorder.events == [EngineEnded(1.0, None)]
    assert recorder.closed == 1


async def test_one_that_is_too_slow_for_the_decode_thread(
    open_engine: OpenEngine, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "asyncinfer.telemetry.observers.DECODE_THREAD", Limits(seconds=-60.0, debt=100.0)
    )
    slow = DecodeRecorder()
    async with open_engine(observers=[slow]) as engine:
        await engine.generate("hello", max_tokens=4)
    assert len(slow.events) == 2
    (fault,) = faults()
    assert "observe() is too slow" in fault["error"]
    assert "it is not called any more" in fault["error"]


async def test_death_is_told() -> None:
    def explode(phase: str, plan: object) -> None:
        raise OSError("gone")

    recorder = Recorder()
    engine = await Engine.open(FakeModel(gate=explode), observers=[recorder])
    with pytest.raises(EngineDead):
        await engine.generate("x")
    await engine.aclose()
    (ended,) = recorder.of(RequestEnded)
    assert (ended.outcome, ended.error) == ("closed", "EngineDead")
    (last,) = recorder.of(EngineEnded)
    assert "gone" in (last.cause or "")


@pytest.mark.parametrize("kind", [Recorder, DecodeRecorder])
async def test_a_hang_is_told(kind: type[Recorder], until: Until) -> None:
    gate = StepGate(closed=True)
    recorder = kind()
    engine = await Engine.open(FakeModel(gate=gate), observers=[recorder], step_timeout=0.2)
    with pytest.raises(EngineDead):
        await engine.generate("x")
    await until(lambda: recorder.closed)
    gate.open()
    await until(lambda: not thread_of(engine).alive)
    await engine.aclose()
    (ended,) = recorder.of(RequestEnded)
    assert ended.outcome == "closed"
    assert "longer than 0.2 s" in (recorder.of(EngineEnded)[0].cause or "")
    assert recorder.closed == 1


async def test_one_that_hangs_the_decode_thread_keeps_the_ends_from_nobody(
    until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StuckOnDecode(Stuck):
        thread: ClassVar[Literal["own", "decode"]] = "decode"

        def observe(self, event: ObserverEvent) -> None:
            observe = Stuck.observe if isinstance(event, RequestStarted) else Recorder.observe
            observe(self, event)

    limits = Limits(seconds=300.0, debt=300.0)
    monkeypatch.setattr("asyncinfer.telemetry.observers.DECODE_THREAD", limits)
    stuck, recorder = StuckOnDecode(), DecodeRecorder()
    engine = await Engine.open(FakeModel(), observers=[stuck, recorder], step_timeout=0.2)
    with pytest.raises(EngineDead):
        await engine.generate("x")
    await until(lambda: recorder.closed)
    told = ["RequestSubmitted", "RequestStarted", "RequestEnded"]
    assert recorder.about("req-1") == told
    # One call at a time: nothing more is told to this one before it returns.
    assert stuck.about("req-1") == told[:2]
    stuck.let_go.set()
    await until(lambda: not thread_of(engine).alive)
    await engine.aclose()
    for observer in (recorder, stuck):
        assert (observer.about("req-1"), observer.closed) == (told, 1)


@pytest.mark.parametrize("where", ["in an observer", "in an event loop"])
async def test_a_hang_while_a_death_is_told_keeps_the_ends_from_nobody(
    where: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, died = threading.Event(), threading.Event()

    def explode(phase: str, plan: object) -> None:
        if phase == "collect" and engine.stats().running == 3:
            died.set()
            raise OSError("gone")

    class StuckAtAnEnd(DecodeRecorder):
        def observe(self, event: ObserverEvent) -> None:
            super().observe(event)
            if where == "in an observer" and isinstance(event, RequestEnded):
                assert let_go.wait(120)

    def flush(self: LoopBridge) -> None:
        if where == "in an event loop" and died.is_set():
            assert let_go.wait(120)
        before(self)

    before = LoopBridge.flush
    monkeypatch.setattr(LoopBridge, "flush", flush)
    limits = Limits(seconds=300.0, debt=300.0)
    monkeypatch.setattr("asyncinfer.telemetry.observers.DECODE_THREAD", limits)
    recorder = Recorder()
    model = FakeModel(gate=explode, max_context=200_000, blocks=40_000)
    engine = await Engine.open(model, observers=[StuckAtAnEnd(), recorder], step_timeout=0.2)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(_meet_its_death, engine)
    await until(lambda: recorder.closed)
    assert sorted(each.request_id for each in recorder.of(RequestEnded)) == [
        "req-1",
        "req-2",
        "req-3",
    ]
    let_go.set()
    await until(lambda: not thread_of(engine).alive)
    await engine.aclose()
    assert len(recorder.of(RequestEnded)) == 3


async def _meet_its_death(engine: Engine) -> None:
    with pytest.raises(EngineDead):
        await engine.generate("x", max_tokens=100_000, ignore_eos=True)


async def test_a_hang_without_a_thread_to_spare_is_told_late(
    until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(runtime: Threads, worker: object) -> Any:
        raise RuntimeError("can't start new thread")

    gate = StepGate(closed=True)
    recorder = DecodeRecorder()
    engine = await Engine.open(FakeModel(gate=gate), observers=[recorder], step_timeout=0.2)
    monkeypatch.setattr(Threads, "start", refused)
    with pytest.raises(EngineDead):
        await engine.generate("x")
    assert not recorder.of(RequestEnded)
    gate.open()
    await until(lambda: not thread_of(engine).alive)
    await engine.aclose()
    assert recorder.about("req-1")[-1] == "RequestEnded"
    assert recorder.closed == 1


async def test_a_failing_row_is_told() -> None:
    recorder = Recorder()
    model = FakeModel(failing=lambda plan: {0: ValueError("NaN")})
    async with Engine(model, observers=[recorder]) as engine:
        with pytest.raises(RequestFailed):
            await engine.generate("x")
    (ended,) = recorder.of(RequestEnded)
    assert (ended.outcome, ended.error, ended.finish_reasons) == (
        "failed",
        "RequestFailed",
        (None,),
    )


class Named(Recorder):
    """An observer with arguments."""

    made: ClassVar[list[Named]] = []

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size={size}: must be >= 1")
        self.size = size
        Named.made.append(self)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "_registered", {})
    monkeypatch.setattr(observers, "_loaded", {})
    monkeypatch.setattr(Named, "made", [])
    observers.register("named", Named)


@pytest.mark.usefixtures("named")
async def test_by_name_and_with_arguments(open_engine: OpenEngine) -> None:
    async with open_engine(observers=["named", ("named", {"size": 7})]) as engine:
        await engine.generate("hello", max_tokens=2)
    assert [observer.size for observer in Named.made] == [1, 7]
    assert [len(observer.events) for observer in Named.made] == [6, 6]


class Deaf:
    """No observer."""


class Elsewhere(Recorder):
    thread = "moon"  # type: ignore[assignment]


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (3, "'int' .*no method 'observe'"),
        (Deaf(), "'Deaf' .*no method 'observe'"),
        (Recorder, "Recorder is a class; give an instance"),
        ("nobody", "no plugin 'nobody' in group asyncinfer.observers; known: named, .*request-log"),
        (("named", {"size": 0}), r"'named' .*cannot be made: .*size=0: must be >= 1"),
        (("named", {"colour": 1}), "'named' .*colour"),
        (Elsewhere(), "thread='moon': must be 'own' or 'decode'"),
    ],
)
async def test_a_wrong_one_is_named_and_the_others_are_closed(wrong: Any, says: str) -> None:
    recorder, before = Recorder(), observer_threads()
    with pytest.raises(PluginError, match=says):
        await Engine.open(FakeModel(), observers=[recorder, "named", wrong])
    assert recorder.events == []
    assert recorder.closed == 1
    assert [observer.closed for observer in Named.made] == [1]
    assert observer_threads() <= before


async def test_they_are_closed_where_the_model_cannot_be_loaded() -> None:
    recorder = Recorder()
    with pytest.raises(ModelLoadError):
        await Engine.open(
            FakeModel(load_error=ModelLoadError("no such file")), observers=[recorder]
        )
    assert (recorder.events, recorder.closed) == ([], 1)


@pytest.mark.parametrize(
    "wrong",
    ["named", 3, None, {"named": {}}, [["named", {}]], [("named",)], [("named", 3)], [(3, {})]],
)
def test_options_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="observers"):
        EngineConfig(observers=wrong)


def test_an_inline_engine_has_none() -> None:
    with pytest.raises(ValueError, match="observers"):
        InlineEngine(FakeModel(), observers=[Recorder()])


def test_a_list_is_kept_as_it_was() -> None:
    chosen = ["request-log"]
    config = EngineConfig(observers=chosen)
    chosen.append("other")
    assert config.observers == ("request-log",)


async def test_the_request_log(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture, gate: StepGate, until: Until
) -> None:
    caplog.set_level(logging.INFO, "asyncinfer.requests")
    async with open_engine(
        kind=TimedEngine, observers=["request-log", ("request-log", {"slower_than": 1e6})]
    ) as engine:
        await engine.generate("hello", max_tokens=2)
        gate.close()
        before = gate.arrived

        async def late() -> None:
            with pytest.raises(RequestFailed):
                await engine.generate("x", max_tokens=2000, deadline=1.0)

        async with anyio.create_task_group() as group:
            group.start_soon(late)
            await until(lambda: gate.arrived > before)
            engine.time.go_by(2.0)
    lines = [record for record in caplog.records if record.name == "asyncinfer.requests"]
    # Each on its thread: one tells of both requests, the other of the one that failed.
    lines.sort(key=lambda record: record.levelno)
    assert [record.levelname for record in lines] == ["INFO", "WARNING", "WARNING"]
    assert (
        lines[0]
        .getMessage()
        .startswith("req-1 finished length prompt=5 cached=0 completion=2 queued=")
    )
    assert "DeadlineExceeded: req-2: deadline passed" in lines[1].getMessage()
    with pytest.raises(PluginError, match="slower_than=-1"):
        await Engine.open(FakeModel(), observers=[("request-log", {"slower_than": -1})])


@pytest.mark.asyncio
async def test_steps_tell_what_formats_and_drafts_cost() -> None:
    told = StepRecorder()
    options: dict[str, Any] = {"choice": ["an answer", "another"], "max_tokens": 20, "seed": 3}
    async with Engine(FakeModel(), observers=[told], proposers=["prompt-lookup"]) as engine:
        await engine.generate("hello", **options)
        await engine.generate("hello", **options, logprobs=0)
        await engine.generate("hello", max_tokens=4)
        stats = engine.stats()
    begun = [event for event in told.events if isinstance(event, RequestSubmitted)]
    first, again, without = [event.compile_seconds for event in begun]
    assert first == stats.compile_seconds > 0
    assert (again, without) == (0.0, None)
    steps = [event for event in told.events if isinstance(event, StepTaken)]
    (drafts,) = stats.drafts
    assert sum(step.masks for step in steps) == stats.masks > 2
    assert sum(step.mask_seconds for step in steps) == pytest.approx(stats.mask_seconds)
    assert sum(step.forced_tokens for step in steps) == stats.forced_tokens > 2
    # Drafts rest where steps turn out slow, so only the first one is certain.
    assert sum(step.accepted_tokens for step in steps) == sum(drafts.accepted) > 0
    assert sum(step.rejected_tokens for step in steps) == sum(drafts.rejected)
