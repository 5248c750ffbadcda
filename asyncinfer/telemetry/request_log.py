"""`RequestLog`: one log line per request."""

from __future__ import annotations

import logging
from typing import Final

from asyncinfer.protocols import Observer, ObserverEvent, RequestEnded, check_real

__all__ = ["RequestLog"]

_LOGGER: Final = logging.getLogger("asyncinfer.requests")


class RequestLog(Observer):
    """Logs one line per request when it ends: outcome, tokens, times, error.

    Logger `asyncinfer.requests`, level info, or warning for one that failed. With `slower_than`
    seconds, only those that took longer, and those that failed.
    """

    def __init__(self, slower_than: float = 0.0) -> None:
        self._slower_than = check_real("slower_than", slower_than, 0.0, float("inf"))

    def observe(self, event: ObserverEvent) -> None:
        if not isinstance(event, RequestEnded):
            return
        failed = event.outcome == "failed"
        if event.timings.total < self._slower_than and not failed:
            return
        reasons = ",".join(reason or "-" for reason in event.finish_reasons)
        usage, timings = event.usage, event.timings
        _LOGGER.log(
            logging.WARNING if failed else logging.INFO,
            "%s %s %s prompt=%d cached=%d completion=%d queued=%.3f ttft=%.3f total=%.3f%s",
            event.request_id,
            event.outcome,
            reasons,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            timings.queued,
            timings.ttft,
            timings.total,
            f" {event.error}: {event.message}" if event.error else "",
        )
