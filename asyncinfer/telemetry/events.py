"""Every event the engine tells about: name, level, fields."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

__all__ = ["EVENTS", "Event"]


class Event(NamedTuple):
    """One kind of event."""

    level: int
    #: The fields it always has; an emitter may add more.
    fields: tuple[str, ...]
    meaning: str


EVENTS: Final[dict[str, Event]] = {
    "engine_loaded": Event(
        logging.INFO,
        ("model", "blocks"),
        "the engine takes requests; `notes`, if any, say how its model was taken",
    ),
    "hub_silent": Event(
        logging.WARNING,
        ("model", "hub", "seconds"),
        "the hub has not answered for so long; it is given up after a while",
    ),
    "hub_unreachable": Event(
        logging.WARNING, ("model", "error"), "the copy in the hub's cache is taken as it is"
    ),
    "graphs_failed": Event(
        logging.WARNING, ("rows", "error"), "no CUDA graph of so many rows; it goes on without"
    ),
    "engine_closed": Event(logging.INFO, (), "its owner closed it"),
    "engine_dead": Event(logging.ERROR, ("cause",), "the decode loop ended by a fault"),
    "request_admitted": Event(logging.DEBUG, ("request_id",), "it left the queue for the batch"),
    "step_retracted": Event(
        logging.WARNING,
        ("tokens", "rows", "error"),
        "the device had no memory for a step; the next ones are smaller",
    ),
    "request_preempted": Event(logging.DEBUG, ("request_id",), "it gave its blocks back for now"),
    "request_finished": Event(logging.DEBUG, ("request_id",), "its answer is complete"),
    "request_aborted": Event(logging.DEBUG, ("request_id",), "its consumer left"),
    "request_refused": Event(logging.INFO, ("reason",), "the engine holds all it may hold"),
    "request_failed": Event(logging.WARNING, ("request_id", "error"), "it failed, and only it"),
    "plugin_failed": Event(logging.WARNING, ("group", "error"), "it misbehaved: see `error`"),
    "plugin_ignored": Event(
        logging.WARNING,
        ("group", "name", "origin", "reason"),
        "at open: it is installed, and nobody can use it",
    ),
    "events_dropped": Event(logging.WARNING, ("observer", "count"), "it was too slow for them"),
}
