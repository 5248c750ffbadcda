"""How many requests an engine holds: counted in where they are submitted, out where they end."""

from __future__ import annotations

from threading import Lock

from asyncinfer.errors import Overloaded
from asyncinfer.telemetry import emit

__all__ = ["Admission"]


class Admission:
    """Bounds the requests between submission and end, so that overload is refused at once
    rather than queued. Callable from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self.held = 0
        self.refused = 0

    def enter(self, requests: int) -> None:
        """Count `requests` in, or raise `Overloaded`."""
        with self._lock:
            held = self.held
            if held + requests <= self._limit:
                self.held += requests
                return
            self.refused += 1
        reason = (
            f"max_requests={self._limit}: {held} requests are held, {requests} more were asked "
            "for; try again later"
        )
        emit("request_refused", reason=reason)
        raise Overloaded(reason)

    def leave(self, requests: int) -> None:
        with self._lock:
            self.held -= requests
