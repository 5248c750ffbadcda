"""Every log event: name, level, fields."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

__all__ = ["EVENTS", "LogEvent"]


class LogEvent(NamedTuple):
    """One kind of log event."""

    level: int
    #: The fields that every event of the kind has; an emitter may add more.
    fields: tuple[str, ...]
    meaning: str


EVENTS: Final[dict[str, LogEvent]] = {
    "engine_loaded": LogEvent(
        logging.INFO,
        ("model", "blocks"),
        "the engine takes requests; `notes`, if any, say how its model was taken",
    ),
    "hub_silent": LogEvent(
        logging.WARNING,
        ("model", "hub", "seconds"),
        "the hub has not answered for so long; it is given up after a while",
    ),
    "hub_unreachable": LogEvent(
        logging.WARNING, ("model", "error"), "the copy in the hub's cache is taken as it is"
    ),
    "adapter_loaded": LogEvent(
        logging.INFO, ("name", "rank", "bytes"), "requests may name the LoRA adapter"
    ),
    "adapter_unloaded": LogEvent(
        logging.INFO, ("name",), "no further request may name the LoRA adapter"
    ),
    "adapter_base_differs": LogEvent(
        logging.WARNING,
        ("name", "base", "model"),
        "a LoRA adapter was trained on a model of another name; its shapes fit",
    ),
    "fallback": LogEvent(
        logging.WARNING, ("part", "reason"), "it goes on without kernels, or CUDA graphs"
    ),
    "engine_closed": LogEvent(logging.INFO, (), "its owner closed it"),
    "engine_dead": LogEvent(logging.ERROR, ("cause",), "the decode loop ended by a fault"),
    "request_admitted": LogEvent(logging.DEBUG, ("request_id",), "it left the queue for the batch"),
    "step_retracted": LogEvent(
        logging.WARNING,
        ("tokens", "rows", "error"),
        "the device had no memory for a step; the next ones are smaller",
    ),
    "request_preempted": LogEvent(
        logging.DEBUG, ("request_id",), "it gave its blocks back for now"
    ),
    "request_finished": LogEvent(logging.DEBUG, ("request_id",), "its answer is complete"),
    "request_aborted": LogEvent(logging.DEBUG, ("request_id",), "its consumer left"),
    "request_refused": LogEvent(logging.INFO, ("reason",), "the engine holds all it may hold"),
    "request_failed": LogEvent(logging.WARNING, ("request_id", "error"), "it failed, and only it"),
    "plugin_failed": LogEvent(logging.WARNING, ("group", "error"), "it misbehaved: see `error`"),
    "plugin_ignored": LogEvent(
        logging.WARNING,
        ("group", "name", "origin", "reason"),
        "at open: it is installed, and nobody can use it",
    ),
    "events_dropped": LogEvent(logging.WARNING, ("observer", "count"), "it was too slow for them"),
}
