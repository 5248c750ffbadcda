"""`take_turn` keeps a burst of requests from holding up the event loop."""

from __future__ import annotations

from typing import Final

from anyio.lowlevel import RunVar

from asyncinfer.engine.event_loops import current_bridge
from asyncinfer.engine.loop_bridge import LoopBridge, Waiter
from asyncinfer.engine.turn_limit import TurnLimits

__all__ = ["take_turn"]

#: The limits of the running event loop, and its bridge.
_turns: Final[RunVar[tuple[TurnLimits, LoopBridge]]] = RunVar("asyncinfer_turns")


async def take_turn() -> None:
    """Wait until the event loop has time to read one more request. Reading two hundred in one turn
    takes it tens of milliseconds."""
    found = _turns.get(None)
    if found is None:
        found = TurnLimits(), current_bridge({})
        _turns.set(found)
    limits, bridge = found
    await limits.wait(Waiter(bridge))
