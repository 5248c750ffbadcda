"""Telemetry: structured log events, silent until the host listens; observers and their threads."""

from asyncinfer.telemetry.events import EVENTS
from asyncinfer.telemetry.guarded_observer import GuardedObserver
from asyncinfer.telemetry.log import emit, plugin_reporter
from asyncinfer.telemetry.observers import Observers

__all__ = ["EVENTS", "GuardedObserver", "Observers", "emit", "plugin_reporter"]
