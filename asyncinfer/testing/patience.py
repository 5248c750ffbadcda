"""`with_patience`: ends a kit even if a plugin does not return."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from threading import Thread
from time import monotonic
from typing import Final

from asyncinfer.plugins.supervision import call_in_progress, call_record, stack_of
from asyncinfer.testing.rule_error import RuleError

__all__ = ["LOOK_EVERY", "Waited", "with_patience"]

#: Seconds between two looks.
LOOK_EVERY: Final = 0.02
#: Seconds that a kit may take where the plugin is not called by a supervisor.
AT_MOST: Final = 900.0


class Waited:
    """The seconds for which one call was seen to run, by looks that are `LOOK_EVERY` apart.

    The time between two looks counts for at most twice that: in a process that was stopped, or on a
    machine that slept or was busy, the call had no chance to go on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked = monotonic()

    def look(self, *, same: bool) -> None:
        """`same`: it is the call of the last look."""
        now = monotonic()
        self.seconds += min(now - self._looked, 2 * LOOK_EVERY)
        self._looked = now
        if not same:
            self.seconds = 0.0


def with_patience(work: Callable[[], None], patience: float) -> None:
    """Do `work`, which calls a plugin, on a thread of its own, and raise what it raises.

    Raises:
        RuleError: "returns", if one call of the plugin takes longer than `patience` seconds. Its
            thread is left behind, a daemon.
    """
    raised: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            context.run(work)
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="asyncinfer-check", daemon=True)
    thread.start()
    number = thread.ident
    assert number is not None
    seen: object = None
    began, waited = monotonic(), Waited()
    while thread.is_alive():
        thread.join(LOOK_EVERY)
        record = call_record(number)
        waited.look(same=record is not None and record == seen)
        seen, total = record, monotonic() - began
        if waited.seconds > patience or total > AT_MOST:
            call, stack = call_in_progress(number) or "a call", stack_of(number)
            if thread.is_alive():
                took = total if record is None else waited.seconds
                raise RuleError("returns", f"{call} did not return in {took:.3g} s:\n{stack}")
    if raised:
        raise raised[0]
