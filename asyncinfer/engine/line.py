"""`Line`: so many submissions in one turn of an event loop, and the others after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asyncinfer.engine.ports import Cell, Port

__all__ = ["Line"]

#: Short prompts prepared in one turn of a loop: each takes it a few tenths of a millisecond.
MOST: Final = 16


class Line:
    """Those that submit on one event loop, in their order. Used on that loop only."""

    def __init__(self, port: Port, on_idle: Callable[[], object]) -> None:
        """`on_idle` is called when a turn of the loop passed in which nobody submitted."""
        self._port = port
        self._on_idle = on_idle
        self._passed = 0
        #: Whether `_turn` is due.
        self._turning = False
        self._waiting: dict[Cell, None] = {}

    def enter(self, cell: Cell) -> bool:
        """Whether it may pass at once; else it is woken when it may, and `waits` no more."""
        if not self._turning:
            self._turning = True
            self._port.soon(self._turn)
        if self._passed < MOST and not self._waiting:
            self._passed += 1
            return True
        self._waiting[cell] = None
        return False

    def waits(self, cell: Cell) -> bool:
        return cell in self._waiting

    def leave(self, cell: Cell) -> None:
        """It waits no more, whether it did or not."""
        self._waiting.pop(cell, None)

    def _turn(self) -> None:
        """Everything else on the loop had a turn."""
        self._passed = 0
        while self._waiting and self._passed < MOST:
            cell = next(iter(self._waiting))
            del self._waiting[cell]
            self._passed += 1
            self._port.wake(cell)
        self._turning = self._passed > 0
        if self._turning:
            self._port.soon(self._turn)
        else:
            self._on_idle()
