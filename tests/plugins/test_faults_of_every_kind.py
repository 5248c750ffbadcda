"""A plugin of any kind that hangs, raises, lies or reaches for what is not its own costs at most
its own requests, and a message names it and the call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, ClassVar, Literal

import pytest
import torch
from support import TimedEngine, Until, admission_of, thread_of

from asyncinfer import Engine, EngineClosed, EngineDead, RequestFailed
from asyncinfer.cache import LRU
from asyncinfer.models import ModelConfig
from asyncinfer.protocols import (
    CachedBlock,
    EngineOpened,
    Observer,
    ObserverEvent,
    RequestView,
    Sampler,
    SamplerPlugin,
    SamplerStep,
)
from asyncinfer.testing import FakeModel, RandomModel

pytestmark = pytest.mark.anyio

#: Does something in a call of a plugin, with what the call is shown; gives its answer, if it has
#: one of its own.
Act = Callable[[Any], Any]


@pytest.fixture
def anyio_backend() -> str:
    """Where a plugin fails is far below the event loop."""
    return "asyncio"


# -- one plugin of each kind, wrong where it is told to ------------------------------------------


@dataclass(frozen=True)
class FaultySampler(SamplerPlugin):
    """Asks `act`."""

    act: Act

    draws: ClassVar[bool] = True

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Faulty(self.act)


class _Faulty(Sampler):
    def __init__(self, act: Act) -> None:
        self.act = act

    def join(self, slot: int, params: Any) -> None:
        """It has nothing to keep."""

    def sample(self, step: SamplerStep) -> Any:
        return self.act(step)


class FaultyCachePolicy(LRU):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def published(self, block: CachedBlock) -> None:
        self.act(block)

    def victims(self, count: int) -> Sequence[int]:
        answer: Any = self.act(None)
        return super().victims(count) if answer is None else answer  # type: ignore[no-any-return]


class FaultyScheduler:
    def __init__(self, act: Act) -> None:
        self.act = act

    def rank(self, request: RequestView, now: float) -> Any:
        answer = self.act(request)
        return (request.arrival,) if answer is None else answer


class FaultyObserver(Observer):
    def __init__(self, act: Act) -> None:
        self.act = act

    def observe(self, event: ObserverEvent) -> None:
        # What an engine does before it is open is not measured by its requests.
        if not isinstance(event, EngineOpened):
            self.act(event)


class FaultyDecodeObserver(FaultyObserver):
    thread: ClassVar[Literal["own", "decode"]] = "decode"


@dataclass(frozen=True)
class Kind:
    group: str
    name: str
    #: The call that is wrong first.
    method: str
    #: The options of an engine that has this plugin, and those of a request that asks for it.
    engine: Callable[[Act], dict[str, Any]] = lambda act: {}
    request: Callable[[Act], dict[str, Any]] = lambda act: {}
    #: What becomes of it.
    then: str = ""


KINDS = {
    "sampler": Kind(
        "asyncinfer.samplers",
        "FaultySampler",
        "sample",
        request=lambda act: {"sampler": FaultySampler(act)},
    ),
    "cache policy": Kind(
        "asyncinfer.cache_policies",
        "FaultyCachePolicy",
        "published",
        engine=lambda act: {"cache_policy": FaultyCachePolicy(act)},
        then="LRU takes over",
    ),
    "scheduler": Kind(
        "asyncinfer.schedulers",
        "FaultyScheduler",
        "rank",
        engine=lambda act: {"scheduler": FaultyScheduler(act)},
        then="first-come-first-served takes over",
    ),
    "observer": Kind(
        "asyncinfer.observers",
        "FaultyObserver",
        "observe",
        engine=lambda act: {"observers": [FaultyObserver(act)]},
    ),
    "observer on the decode thread": Kind(
        "asyncinfer.observers",
        "FaultyDecodeObserver",
        "observe",
        engine=lambda act: {"observers": [FaultyDecodeObserver(act)]},
    ),
}


def small_model(kind: str) -> Any:
    """One that runs samplers where it has to; with so few blocks that some must go."""
    if kind != "sampler":
        return FakeModel(blocks=12, max_context=160)
    return RandomModel(
        ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_context=160,
        )
    )


async def serve(engine: Engine, wrong: dict[str, Any]) -> list[Any]:
    """What became of requests side by side, one of which may ask for something wrong: token ids,
    or an error."""

    async def one(number: int, more: dict[str, Any]) -> Any:
        # Prompts of a few blocks.
        prompt = f"request {number} " * 5
        options = {"max_tokens": 6, "temperature": 1.0, "seed": number, "ignore_eos": True}
        done = await engine.generate(prompt, **options, **more)
        return done.token_ids

    requests = [one(number, wrong if number == 1 else {}) for number in range(4)]
    return await asyncio.gather(*requests, return_exceptions=True)


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.WARNING, "asyncinfer")

    def found() -> list[dict[str, Any]]:
        events = [record.asyncinfer for record in caplog.records]  # type: ignore[attr-defined]
        return [event for event in events if event["event"] == "plugin_failed"]

    return found


async def check(kind: str, act: Act, says: str, reports: Any, **config: Any) -> None:
    """The faulty one harms its own requests only, and is named once."""
    tested = KINDS[kind]
    options = {"device": "cpu", "kv_bytes": 1 << 20, "max_running": 3, "sampler_timeout": 60.0}
    async with Engine(small_model(kind), **options) as engine:
        expected = await serve(engine, {})
        expected += await serve(engine, {})
    async with Engine(small_model(kind), **{**options, **tested.engine(act), **config}) as engine:
        found = await serve(engine, tested.request(act))
        found += await serve(engine, tested.request(act))
        stats = engine.stats()
        assert stats.running == stats.waiting == 0
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if tested.request(act) and number % 4 == 1:
            assert isinstance(other, RequestFailed)
            assert f"plugin '{tested.name}'" in str(other)
            assert says in str(other)
        else:
            assert other == one
    faults = [fault for fault in reports() if says in fault["error"]]
    assert len(faults) == 1
    assert faults[0]["group"] == tested.group
    assert (
        f"plugin '{tested.name}' (given as an object, group {tested.group})" in faults[0]["error"]
    )
    assert tested.then in faults[0]["error"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error",
    [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError],
)
async def test_whatever_it_raises(kind: str, error: type[BaseException], reports: Any) -> None:
    # fault 18, 22
    def act(shown: Any) -> Any:
        raise error("by the plugin")

    says = f"{KINDS[kind].method}() raised: {error.__name__}"
    await check(kind, act, says, reports)


SHOWN = {
    "sampler": "logits",
    "cache policy": "uses",
    "scheduler": "prompt_len",
    "observer": "time",
    "observer on the decode thread": "time",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_it_writes_to_what_it_is_shown(kind: str, reports: Any) -> None:
    def act(shown: Any) -> Any:
        if shown is not None:
            setattr(shown, SHOWN[kind], 0)

    await check(kind, act, f"{KINDS[kind].method}() raised: ", reports)


LIES: dict[str, tuple[Act, str]] = {
    "sampler": (lambda step: torch.full_like(step.slots, 10**6), "a token that is out of range"),
    "cache policy": (
        lambda block: [-3] if block is None else None,
        "victims() gave no usable answer: ValueError('victim -3 is not an evictable block')",
    ),
    "scheduler": (
        lambda request: (request.deadline,),
        "rank() gave no usable answer: TypeError",
    ),
}


@pytest.mark.parametrize("kind", LIES)
async def test_it_lies(kind: str, reports: Any) -> None:
    # fault 19, 21
    act, says = LIES[kind]
    await check(kind, act, says, reports)


SLOW = {
    "sampler": "3 calls of sample() in a row took more than sampler_timeout=0.05 s",
    "cache policy": "published() is too slow: it took",
    "scheduler": "rank() is too slow: it took",
    "observer on the decode thread": "observe() is too slow: it took",
}


@pytest.mark.parametrize("kind", SLOW)
async def test_it_is_slow(kind: str, reports: Any) -> None:
    # fault 20
    def act(shown: Any) -> Any:
        Event().wait(0.1 if kind == "sampler" else 1.2)
        return shown.draw(shown.weights()) if kind == "sampler" else None

    config = {"sampler_timeout": 0.05} if kind == "sampler" else {}
    await check(kind, act, SLOW[kind], reports, **config)


# -- one that never returns ----------------------------------------------------------------------


class Stuck:
    """Hangs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = Event(), Event()

    def __call__(self, shown: Any) -> Any:
        self.begun.set()
        self.stuck_in_here()

    def stuck_in_here(self) -> None:
        assert self.let_go.wait(120)


@pytest.mark.parametrize("kind", SLOW)
async def test_it_hangs(kind: str, until: Until) -> None:
    # fault 17: what no thread can end ends the engine in time, and says whose fault it is.
    tested, stuck = KINDS[kind], Stuck()
    engine = await TimedEngine.open(
        small_model(kind), device="cpu", kv_bytes=1 << 20, step_timeout=2.0, **tested.engine(stuck)
    )
    try:
        serving = asyncio.create_task(serve(engine, tested.request(stuck)))
        await until(stuck.begun.is_set)
        engine.time.go_by(3.0)
        for result in await serving:
            assert isinstance(result, EngineDead)
            first, _, stack = str(result).partition("\n")
            assert "ran longer than 2 s" in first
            assert f"in {tested.method}() of plugin '{tested.name}' (given as an object, " in first
            assert "in stuck_in_here" in stack
        with pytest.raises(EngineDead, match=rf"in {tested.method}\(\) of plugin '{tested.name}'"):
            await engine.aclose()
    finally:
        stuck.let_go.set()


@pytest.mark.parametrize("kind", SLOW)
async def test_one_that_hangs_holds_up_a_close_for_a_second(kind: str, until: Until) -> None:
    """However long a step may take. What hangs finds itself left behind when it comes back."""
    tested, stuck = KINDS[kind], Stuck()
    engine = await TimedEngine.open(
        small_model(kind),
        device="cpu",
        kv_bytes=1 << 20,
        step_timeout=300.0,
        **tested.engine(stuck),
    )
    thread, admission = thread_of(engine), admission_of(engine)
    try:
        serving = asyncio.create_task(serve(engine, tested.request(stuck)))
        await until(stuck.begun.is_set)
        closing = asyncio.create_task(engine.aclose(drain_timeout=0.0))
        await until(lambda: admission.drain_until is not None)
        engine.time.go_by(1.5)
        with pytest.raises(EngineDead) as raised:
            await closing
        first, _, stack = str(raised.value).partition("\n")
        assert "a plugin's call kept a close waiting for 1 s, in " in first
        assert f"{tested.method}() of plugin '{tested.name}' (given as an object, " in first
        assert "in stuck_in_here" in stack
        assert all(isinstance(each, EngineClosed | EngineDead) for each in await serving)
        assert thread.alive
        assert admission.held == admission.held_bytes == 0
    finally:
        stuck.let_go.set()
    await until(lambda: not thread.alive)
    assert engine.health().state == "dead"
    assert admission.held == admission.held_bytes == 0


@pytest.mark.parametrize("found_by", ["the watchdog", "the close"])
async def test_an_observer_that_hangs_as_the_engine_closes(
    found_by: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()

    class HangsAtTheEnd(FaultyDecodeObserver):
        def close(self) -> None:
            self.act(None)

        def observe(self, event: ObserverEvent) -> None:
            """It hears."""

    engine = await TimedEngine.open(FakeModel(), observers=[HangsAtTheEnd(stuck)], step_timeout=2.0)
    assert not any(isinstance(each, Exception) for each in await serve(engine, {}))
    # One that has time waits while a second one, which has none, is told.
    first = asyncio.create_task(engine.aclose(drain_timeout=1000.0))
    try:
        await until(stuck.begun.is_set)
        if found_by == "the watchdog":
            engine.time.go_by(3.0)
        else:
            monkeypatch.setattr("asyncinfer.engine.closing.CLOSE_GRACE", 0.1)
        with pytest.raises(EngineDead, match=r"in close\(\) of plugin 'HangsAtTheEnd'"):
            await engine.aclose(drain_timeout=0.0)
    finally:
        stuck.let_go.set()
        with suppress(EngineDead):
            await first


async def test_an_observer_that_hangs_on_its_own_thread_is_survived(
    reports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncinfer.telemetry.observers.CLOSE_SECONDS", 0.2)
    stuck = Stuck()
    async with Engine(FakeModel(), observers=[FaultyObserver(stuck)]) as engine:
        assert not any(isinstance(each, Exception) for each in await serve(engine, {}))
        assert stuck.begun.wait(120)
        assert not any(isinstance(each, Exception) for each in await serve(engine, {}))
    (fault,) = reports()
    assert "plugin 'FaultyObserver'" in fault["error"]
    assert "is left behind" in fault["error"]
    stuck.let_go.set()
