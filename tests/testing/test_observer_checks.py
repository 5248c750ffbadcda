"""The conformance kit passes the shipped observer and catches wrong ones, each by its rule."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.plugins import observers
from asyncinfer.protocols import (
    EngineEnded,
    EngineOpened,
    EventsDropped,
    Observer,
    RequestEnded,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    StepTaken,
)
from asyncinfer.testing import RuleError, check_observer


def test_the_shipped_one_passes() -> None:
    check_observer(lambda: observers.resolve("request-log"))


class Good(Observer):
    """Tokens by scope; the wrong ones differ from it in one thing."""

    every_step = True

    def __init__(self) -> None:
        self.scopes: dict[str, str] = {}
        self.tokens = {"": 0}
        self.lock = threading.Lock()

    def observe(self, event: Any) -> None:
        with self.lock:
            if isinstance(event, RequestSubmitted):
                self.scopes[event.request_id] = event.cache_scope
            elif isinstance(event, RequestEnded):
                scope = self.scopes.pop(event.request_id, "")
                done = event.usage.completion_tokens
                self.tokens[scope] = self.tokens.get(scope, 0) + done


def test_the_base_of_the_wrong_ones_is_right() -> None:
    check_observer(Good)


class WithoutClose:
    every_step = False
    observe = Good.observe


class TakesNothing(Good):
    def observe(self) -> None:  # type: ignore[override]
        pass


class OnThreads(Good):
    thread = "main"  # type: ignore[assignment]


class CannotBeMade(Good):
    def __init__(self) -> None:
        raise OSError("no disk")


class Registered(Good):
    """Never gives its name back."""

    names: set[str] = set()  # noqa: RUF012

    def __init__(self) -> None:
        if len(self.names) > 3:
            raise ValueError("the name is taken")
        self.names.add(str(len(self.names)))
        super().__init__()


class NeedsTheBeginning(Good):
    """A dropped `RequestSubmitted` is a `KeyError`."""

    def observe(self, event: Any) -> None:
        if isinstance(event, RequestEnded):
            self.scopes[event.request_id]
        super().observe(event)


class KnowsAll(Good):
    def observe(self, event: Any) -> None:
        match event:
            case EngineOpened() | EngineEnded() | EventsDropped() | StepTaken():
                pass
            case _:
                super().observe(event)
                assert event.request_id


class NeedsAnEngine(Good):
    """Is not made to be closed before an engine opened."""

    def observe(self, event: Any) -> None:
        if isinstance(event, EngineOpened):
            self.stats = event.stats

    def close(self) -> None:
        self.stats()


class Joins(Good):
    """An answer that did not come to its end has no reason."""

    def observe(self, event: Any) -> None:
        if isinstance(event, RequestEnded):
            ", ".join(event.finish_reasons)  # type: ignore[arg-type]


class Divides(Good):
    """A request may end without a token."""

    def observe(self, event: Any) -> None:
        if isinstance(event, RequestEnded):
            event.timings.total / event.usage.completion_tokens


class NoGaps(Good):
    """A step may draw only first tokens."""

    def observe(self, event: Any) -> None:
        if isinstance(event, StepTaken):
            max(event.gaps)


class OfItsThread(Good):
    """Works on the thread that made it alone, as a connection of SQLite does."""

    def __init__(self) -> None:
        super().__init__()
        self.made_on = threading.current_thread()

    def observe(self, event: Any) -> None:
        if threading.current_thread() is not self.made_on:
            raise RuntimeError("made on another thread")


class Exits(Good):
    def observe(self, event: Any) -> None:
        if isinstance(event, EngineEnded):
            sys.exit("over")


class EntersTheContext(Good):
    """Only one thread can be in a context."""

    def observe(self, event: Any) -> None:
        if isinstance(event, RequestSubmitted):
            event.context.run(dict)


class Writes(Good):
    def observe(self, event: Any) -> None:
        if isinstance(event, RequestStarted):
            object.__setattr__(event, "request_id", event.request_id.upper())


class Waits(Good):
    lets_go = threading.Event()


class Hangs(Waits):
    def observe(self, event: Any) -> None:
        if isinstance(event, RequestPreempted):
            self.lets_go.wait()


class KeepsItsThread(Waits):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self.lets_go.wait, name="exporter", daemon=True).start()


class KeepsItsFile(Good):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__)  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()


class RemembersAll(Good):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def observe(self, event: Any) -> None:
        super().observe(event)
        if isinstance(event, RequestEnded):
            self.ids.append(event.request_id)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (WithoutClose, "methods: .*has no method 'close'"),
        (TakesNothing, r"methods: .*'observe' must take \(event\)"),
        (OnThreads, "methods: thread is 'main'"),
        (CannotBeMade, "made: .*no disk"),
        (Registered, "made: .*the name is taken"),
        (NeedsTheBeginning, r"never raises: observe\(RequestEnded\) raised KeyError"),
        (KnowsAll, r"never raises: observe\(SomethingNew\) raised AttributeError"),
        (NeedsAnEngine, r"never raises: close\(\) raised AttributeError"),
        (Joins, r"never raises: observe\(RequestEnded\) raised TypeError"),
        (Divides, r"never raises: observe\(RequestEnded\) raised ZeroDivisionError"),
        (NoGaps, r"never raises: observe\(StepTaken\) raised ValueError"),
        (OfItsThread, r"never raises: observe\(EngineOpened\) raised RuntimeError"),
        (Exits, r"never raises: observe\(EngineEnded\) raised SystemExit"),
        (EntersTheContext, r"never raises: observe\(RequestSubmitted\) raised RuntimeError"),
        (Writes, r"read only: observe\(RequestStarted\) made it .*REQ-"),
        (Hangs, r"returns: observe\(RequestPreempted\) did not in 1 s"),
        (KeepsItsThread, r"gives back: thread 'exporter' goes on"),
        (KeepsItsFile, "gives back: 3 files or sockets more"),
        (RemembersAll, r"memory: [\d,]+ bytes more after 1,000 more requests"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_wrong_observer_is_caught(kind: Callable[[], Observer], says: str) -> None:
    Waits.lets_go.clear()
    try:
        with pytest.raises(RuleError, match=f"^{says}"):
            check_observer(kind, patience=1.0 if kind in (Hangs, KeepsItsThread) else 60.0)
    finally:
        Waits.lets_go.set()
