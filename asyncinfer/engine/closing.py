"""Closes an engine from an event loop, without blocking the loop."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.errors import EngineDead

__all__ = ["close"]

#: Seconds that a close waits for the running step, beyond the time that requests get.
CLOSE_GRACE = 10.0
#: Seconds that a close waits for threads with nothing left to do, and between two looks at them.
LAST_STEPS = 10.0
WORKERS_END = 0.02
GLANCE = 1e-3


async def close(
    frontend: Frontend, thread: DecodeThread, drain: float, clock: Callable[[], float]
) -> None:
    """End the thread within `drain` seconds and the grace. Raises `EngineDead` if it hangs."""
    bridge = frontend.bridge()
    began = clock()
    opening = frontend.core is None
    if opening:
        drain = 0.0
        thread.cancel_open()
    else:
        frontend.drain(drain)
        thread.notice_close()
    dropped = False
    try:
        if drain > 0.0:
            with anyio.move_on_after(drain):
                try:
                    await thread.closed.wait(bridge)
                except GeneratorExit:
                    # A finalizer closes the coroutine, so this takes no lock and waits for nothing.
                    # The surrounding scope may replace this exception, so a flag remembers it.
                    dropped = True
                    frontend.forget()
                    raise
    except BaseException:
        if not dropped:
            # The task was cancelled, so that running requests are aborted.
            frontend.drain(0.0)
            thread.notice_close()
            await _end(frontend, thread, bridge, clock)
        raise
    stopped = await _end(frontend, thread, bridge, clock)
    if not stopped:
        if thread.hung is not None:
            raise thread.hung()
        doing = "loads the model" if opening else "computes"
        raise EngineDead(
            f"the decode thread did not stop within {clock() - began:.1f} s, and still {doing}"
            f"{thread.where()}"
        )


async def _end(
    frontend: Frontend, thread: DecodeThread, bridge: LoopBridge, clock: Callable[[], float]
) -> bool:
    """Wait for everything that runs to end. Returns whether the thread ended."""
    # A cancelled task does not wait at all where the thread is done already.
    with anyio.CancelScope(shield=True):
        try:
            if not thread.closed.is_set:
                with anyio.move_on_after(CLOSE_GRACE):
                    await thread.closed.wait(bridge)
        finally:
            # In a `finally`: asyncio may cancel the task again in spite of the shield.
            frontend.dismiss()
        # A thread that hangs was waited for long enough. Prompt workers end by themselves, each
        # after its prompt.
        rest = LAST_STEPS if thread.closed.is_set and thread.hung is None else 0.0
        stopped = await _end_of(lambda: thread.alive, rest, clock)
        await _end_of(lambda: frontend.preparing, WORKERS_END, clock)
    return stopped


async def _end_of(working: Callable[[], bool], seconds: float, clock: Callable[[], float]) -> bool:
    """Wait until `working` is false, `seconds` at most; whether it became so."""
    until = clock() + seconds
    while working():
        if clock() >= until:
            return False
        await anyio.sleep(GLANCE)
    return True
