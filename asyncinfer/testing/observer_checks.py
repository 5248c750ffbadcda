"""`check_observer`: whether an observer keeps the rules of its protocol."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from itertools import pairwise
from textwrap import shorten
from time import monotonic
from typing import Any, Final

from asyncinfer.errors import PluginError
from asyncinfer.plugins import observers
from asyncinfer.plugins.supervision import interrupted
from asyncinfer.protocols import Observer, RequestEnded, RequestSubmitted
from asyncinfer.testing.observer_fuzz import random_events
from asyncinfer.testing.patience import LOOK_EVERY, Waited
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.traced_memory import traced_memory

__all__ = ["check_observer"]

#: Short lives, each with its seed, and the requests in one.
LIVES: Final = 8
FEW: Final = 12
#: Requests of the memory rule, and bytes that may be kept for each.
MANY: Final = 1_000
KEEPS: Final = 16

Factory = Callable[[], Observer]


def check_observer(factory: Factory, *, patience: float = 10.0) -> None:
    """Tell observers that `factory` makes what engines may tell them. For pytest::

        def test_my_observer():
            check_observer(MyObserver)

    The rules: it can be made, and again when another one was closed (*made*); every method is
    there and takes what it must (*methods*); no call raises, whatever events were dropped or are
    of a kind unknown to it, on another thread than that which made it, while somebody else is in
    the context of a request, and if the engine never opened (*never raises*); calls return
    (*returns*); events are not written to (*read only*); after `close()` its threads end and the
    files and sockets that it opened are closed (*gives back*); it does not remember every request
    that ever was (*memory*).

    Args:
        factory: makes a new observer, such as its class.
        patience: seconds; a call that takes longer is taken for one that never returns, and a
            thread that runs longer after `close()` for one that never ends.

    Raises:
        RuleError: the rule that is broken, how, and the smallest case.
    """
    observer = _made(factory)
    try:
        observers.resolve(observer)
    except PluginError as error:
        raise RuleError("methods", str(error)) from error
    thread, steps = getattr(observer, "thread", "own"), getattr(observer, "every_step", False)
    if thread not in ("own", "decode"):
        raise RuleError("methods", f"thread is {thread!r}, must be 'own' or 'decode'")
    for life in ([], *(_life(seed, steps) for seed in range(LIVES))):
        broken = _broken(observer, life, patience)
        if broken is not None:
            raise _smallest(factory, life, broken, patience)
        observer = _made(factory)
    observer.close()
    _check_gives_back(factory, _life(0, steps), patience)
    _check_memory(_made(factory), steps)


def _made(factory: Factory) -> Observer:
    try:
        return factory()
    except BaseException as error:
        if interrupted(error):
            raise
        raise RuleError("made", f"it cannot be made: {error!r}") from error


def _life(seed: int, steps: bool) -> list[Any]:
    return [*random_events(seed, FEW, steps=steps, drops=seed % 2 > 0)]


def _broken(observer: Observer, events: Sequence[Any], patience: float) -> RuleError | None:
    """The rule that is broken when the observer is told of these and closed."""
    contexts = (event.context for event in events if isinstance(event, RequestSubmitted))
    told = _Telling(observer, events)
    # In a context that another observer may be in at the same time.
    next(contexts, Context()).run(told.watch, patience)
    return told.broken


class _Telling(threading.Thread):
    """Tells an observer of events and closes it, as its own thread does in an engine."""

    def __init__(self, observer: Observer, events: Sequence[Any]) -> None:
        super().__init__(name="check_observer", daemon=True)
        self.broken: RuleError | None = None
        self._observer = observer
        self._events = events
        #: How many calls returned, and the call that did not yet.
        self._returned = 0
        self._call = ""

    def run(self) -> None:
        try:
            for event in self._events:
                name, before = type(event).__name__, repr(event)
                self._do(f"observe({name})", partial(self._observer.observe, event))
                if repr(event) != before:
                    raise RuleError("read only", f"observe({name}) made it {event}")
            self._do("close()", self._observer.close)
        except RuleError as broken:
            self.broken = broken

    def watch(self, patience: float) -> None:
        """Start it and see it to its end."""
        self.start()
        returned, waited = 0, Waited()
        while self.is_alive() and waited.seconds <= patience:
            self.join(LOOK_EVERY)
            waited.look(same=returned == self._returned)
            returned = self._returned
        if self.is_alive():
            self.broken = RuleError("returns", f"{self._call} did not in {patience:g} s")

    def _do(self, what: str, call: Callable[[], object]) -> None:
        self._call = what
        try:
            call()
        # BaseException: an engine survives sys.exit() too, and Ctrl-C never reaches this thread.
        except BaseException as error:
            raise RuleError("never raises", f"{what} raised {error!r}") from error
        self._returned += 1


def _smallest(
    factory: Factory, events: Sequence[Any], broken: RuleError, patience: float
) -> RuleError:
    """The rule with the fewest events in which it is broken in the same way."""
    case, before = list(events), 0
    # Not for "returns": a call that does not return leaves a thread behind at each try.
    while len(case) != before and broken.rule != "returns":
        before = len(case)
        for event in case[1:-1]:
            fewer = [other for other in case if other is not event]
            again = _broken(_made(factory), fewer, patience)
            if again is not None and str(again) == str(broken):
                case = fewer
    shown = [f"  {number}. {shorten(repr(event), 90)}" for number, event in enumerate(case, 1)]
    heading = "the smallest case, in which events may have been dropped:"
    return RuleError(broken.rule, "\n".join([broken.what, heading, *shown, "  then close()"]))


def _check_gives_back(factory: Factory, life: Sequence[Any], patience: float) -> None:
    kept, files = [], []
    for turn in range(4):
        before = {*threading.enumerate()}
        # Kept, so that no file is closed by the garbage collector.
        kept.append(_made(factory))
        broken = _broken(kept[-1], life, patience)
        if broken is not None:
            raise broken
        until = monotonic() + patience
        # Threads that all observers of a process share may stay: they begin in the first turn.
        for thread in {*threading.enumerate()} - before if turn else ():
            thread.join(max(0.0, until - monotonic()))
            if thread.is_alive():
                raise RuleError("gives back", f"thread {thread.name!r} goes on after close()")
        files.append(_open_files())
    if all(one < other for one, other in pairwise(files)):
        more = files[-1] - files[0]
        raise RuleError("gives back", f"{more} files or sockets more are open after 3 more lives")


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _check_memory(observer: Observer, steps: bool) -> None:
    ended = early = 0
    try:
        with traced_memory() as held:
            for event in random_events(1, 2 * MANY, steps=steps, drops=False):
                told: Any = event
                observer.observe(told)
                ended += isinstance(event, RequestEnded)
                # By now everything bounded is full.
                if ended == MANY and not early:
                    early = held()
            kept = held() - early
    finally:
        observer.close()
    if kept > KEEPS * MANY:
        raise RuleError("memory", f"{kept:,} bytes more after {MANY:,} more requests ended")
