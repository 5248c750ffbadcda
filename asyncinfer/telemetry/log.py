"""`emit`: one structured log event.

Events go to the standard library's logger `asyncinfer`, which belongs to this package and has a
`NullHandler`: without a handler of the host's, nothing is printed. The root logger and its handlers
are never touched.

    logging.getLogger("asyncinfer").setLevel(logging.DEBUG)   # what a host does to see them all

A record's message reads `request_finished request_id='req-1'`; the same as data is its attribute
`record.asyncinfer`. Context variables that a host binds with `structlog.contextvars` join the
fields; structlog itself is not imported, which would take the decode thread a tenth of a second.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import Context
from typing import Final

from asyncinfer.telemetry.events import EVENTS

__all__ = ["emit", "plugin_reporter"]

_LOGGER: Final = logging.getLogger("asyncinfer")
_SILENT: Final = logging.NullHandler()
_LOGGER.addHandler(_SILENT)


def emit(event: str, context: Context | None = None, /, **fields: object) -> None:
    """Log `event` (a name of `EVENTS`) with `fields`, inside `context` if one is given.

    Costs a fraction of a microsecond while nobody listens. Never raises: what a handler or
    filter of the host raises is reported as `logging` reports it, not thrown into the engine.
    """
    level = EVENTS[event].level
    if not _LOGGER.isEnabledFor(level):
        return
    try:
        if context is None:
            _log(level, event, fields)
        else:
            # A copy, since a context cannot be entered twice and the host may be in this one.
            context.copy().run(_log, level, event, fields)
    except Exception:
        record = logging.makeLogRecord({"name": _LOGGER.name, "levelno": level, "msg": event})
        _SILENT.handleError(record)


def plugin_reporter(group: str, faults: list[str] | None = None) -> Callable[[Exception], None]:
    """A function that logs a fault of a plugin of the group, and adds its text to `faults`."""

    def report(fault: Exception) -> None:
        if faults is not None:
            faults.append(str(fault))
        emit("plugin_failed", group=group, error=str(fault))

    return report


def _log(level: int, event: str, fields: dict[str, object]) -> None:
    own = {**fields, "event": event}
    data: dict[str, object] = {"event": event}
    structlog = sys.modules.get("structlog.contextvars")
    if structlog is not None:
        variables = structlog.get_contextvars()
        data |= {name: value for name, value in variables.items() if name not in own}
    data |= own
    message = " ".join([event, *(f"{name}={data[name]!r}" for name in data if name != "event")])
    _LOGGER.log(level, message, extra={"asyncinfer": data})
