"""`emit`: one structured log event.

Events go through structlog to the standard library's logger `asyncinfer`, which belongs to this
package and has a `NullHandler`: without a handler of the host's, nothing is printed. structlog's
own configuration, the root logger and its handlers are never touched.

    logging.getLogger("asyncinfer").setLevel(logging.DEBUG)   # what a host does to see them all

A record's message reads `request_finished request_id='req-1'`; the same as data is its attribute
`record.asyncinfer`. Context variables bound with `structlog.contextvars` join the fields.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from contextvars import Context
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from asyncinfer.telemetry.events import EVENTS

if TYPE_CHECKING:
    import structlog

__all__ = ["emit"]

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
        log = _events().log
        if context is None:
            log(level, event, **fields)
        else:
            # A copy: the host's own thread may be running in the context just now.
            context.copy().run(log, level, event, **fields)
    except Exception:
        record = logging.makeLogRecord({"name": _LOGGER.name, "levelno": level, "msg": event})
        _SILENT.handleError(record)


def _render(
    _: Any, __: str, fields: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, dict[str, dict[str, Any]]]]:
    event = fields.pop("event")
    message = " ".join([event, *(f"{name}={value!r}" for name, value in fields.items())])
    return (message,), {"extra": {"asyncinfer": {"event": event, **fields}}}


@cache
def _events() -> structlog.stdlib.BoundLogger:
    # Imported when somebody listens: it brings half of rich along.
    import structlog

    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        _LOGGER,
        processors=[structlog.contextvars.merge_contextvars, _render],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger
