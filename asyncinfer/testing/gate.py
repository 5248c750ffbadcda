"""Holding the decode loop still, so that a test decides what happens between two steps."""

from __future__ import annotations

import threading
from typing import Literal

from asyncinfer.scheduler import Step

__all__ = ["StepGate"]


class StepGate:
    """A `FakeRunner` gate: closed, every step waits before its launch until it is let through.

    `timeout` bounds every wait in seconds; past it the step raises, so that a broken test ends.
    """

    def __init__(self, *, closed: bool = False, timeout: float = 120.0) -> None:
        self._timeout = timeout
        self._condition = threading.Condition()
        self._permits = 0
        self._is_open = not closed
        #: Steps that reached the gate.
        self.arrived = 0

    def __call__(self, phase: Literal["launch", "collect"], step: Step) -> None:
        if phase != "launch":
            return
        with self._condition:
            self.arrived += 1
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._is_open or self._permits, self._timeout):
                raise TimeoutError(f"the gate stayed closed for {self._timeout} s")
            if not self._is_open:
                self._permits -= 1

    def close(self) -> None:
        with self._condition:
            self._is_open = False

    def open(self) -> None:
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def let(self, steps: int = 1) -> None:
        """Let so many steps through."""
        with self._condition:
            self._permits += steps
            self._condition.notify_all()

    def wait_arrived(self, steps: int) -> None:
        """Block (the calling thread) until so many steps have reached the gate."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.arrived >= steps, self._timeout):
                raise TimeoutError(f"{self.arrived} of {steps} steps reached the gate")
