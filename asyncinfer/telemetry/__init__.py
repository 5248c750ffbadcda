"""Telemetry: structured log events, silent until the host listens."""

from asyncinfer.telemetry.events import EVENTS, Event
from asyncinfer.telemetry.log import emit

__all__ = ["EVENTS", "Event", "emit"]
