"""`with_patience`: a kit ends, also where a plugin does not return."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from threading import Thread
from time import monotonic
from typing import Final

from asyncinfer.plugins.supervision import call_in_progress, call_record, stack_of
from asyncinfer.testing.rule_error import RuleError

__all__ = ["with_patience"]

#: Seconds between two looks.
LOOK_EVERY: Final = 0.02
#: Seconds that a kit may take where the plugin is not called by a supervisor.
AT_MOST: Final = 900.0


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
    began = since = monotonic()
    while thread.is_alive():
        thread.join(LOOK_EVERY)
        now, record = monotonic(), call_record(number)
        if record != seen or record is None:
            seen, since = record, now
        if now - since > patience or now - began > AT_MOST:
            call, stack = call_in_progress(number) or "a call", stack_of(number)
            if thread.is_alive():
                took = now - (began if record is None else since)
                raise RuleError("returns", f"{call} did not return in {took:.3g} s:\n{stack}")
    if raised:
        raise raised[0]
