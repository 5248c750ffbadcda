"""The result of `Engine.health()`."""

from __future__ import annotations

from typing import Final

from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.errors import EngineClosed
from asyncinfer.stats import EngineHealth

__all__ = ["failed", "health_of"]

#: Seconds after which a running step is reported, unless a quarter of `step_timeout` is less.
SLOW: Final = 10.0


def health_of(
    core: Core, admission: Admission, thread: DecodeThread, config: EngineConfig, now: float
) -> EngineHealth:
    """The health of an engine that was opened. Any thread."""
    if thread.ended is not None:
        error = thread.ended()
        if isinstance(error, EngineClosed):
            return EngineHealth("closed", (str(error),))
        return EngineHealth("dead", (str(error),), error.__cause__ or error)
    if admission.drain_until is not None:
        left = max(0.0, admission.drain_until - now)
        why = f"it is closing: {admission.held} requests have {left:.1f} s to end"
        return EngineHealth("draining", (why,))
    reasons = [*core.faults]
    began = core.turn_began
    if began is not None and now - began > min(SLOW, config.step_timeout / 4):
        reasons.append(f"a step has been running for {now - began:.1f} s")
    if admission.held >= admission.limit:
        reasons.append(f"it holds all of max_requests={admission.limit}, and refuses more")
    return EngineHealth("degraded" if reasons else "open", tuple(reasons))


def failed(thread: DecodeThread) -> EngineHealth:
    """The health of an engine that could not be opened, or was closed before it was open."""
    error = thread.load_error
    assert error is not None
    if isinstance(error, EngineClosed):
        return EngineHealth("closed", (str(error),))
    return EngineHealth("dead", (f"it could not be opened: {error}",), error)
