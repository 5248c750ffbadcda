"""The decode thread: loads the model, pumps the core, and whatever ends it ends every stream."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from asyncinfer.engine.core import Command, Core
from asyncinfer.engine.ports import Latch, Port
from asyncinfer.errors import AsyncInferError, EngineClosed, EngineDead
from asyncinfer.telemetry import emit

__all__ = ["DecodeThread"]

#: Seconds between looks at whether anybody is left to work for.
LOOK_EVERY = 0.5
#: Seconds that leaving the interpreter waits for the step that runs.
EXIT_TIMEOUT = 2.0


class DecodeThread:
    """A daemon thread around a `Core`, supervised. It holds no reference to the engine.

    `open_core` runs on the thread: loading a model neither blocks an event loop nor needs a second
    thread that touches the device. It stops when the event it is
    given is set. `home` is the event loop that opened the engine: once that is closed and nothing
    runs, nobody can close the engine any more, and the thread ends.
    """

    def __init__(
        self, open_core: Callable[[threading.Event], Core], home: Port, step_timeout: float
    ) -> None:
        self.opened = Latch()
        self.closed = Latch()
        #: Why no request can be served any more; None while open.
        self.ended: Callable[[], AsyncInferError] | None = None
        self.load_error: BaseException | None = None
        self.core: Core | None = None
        self._open_core = open_core
        self._home = home
        self._step_timeout = step_timeout
        self.cancelled = threading.Event()
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncinfer-decode", daemon=True)
        self._watchdog = threading.Thread(
            target=self._watch, name="asyncinfer-watchdog", daemon=True
        )

    def start(self) -> None:
        # A daemon thread that is inside torch while the interpreter tears down can crash it.
        atexit.register(self._at_exit)
        self._thread.start()

    def cancel_open(self) -> None:
        """Nobody waits for the engine any more: stop loading, or close what was opened."""
        self.cancelled.set()
        if self.core is not None:
            self.core.post(Command.CLOSE, 0.0)

    def join(self, timeout: float) -> bool:
        """Wait for both threads; whether they ended."""
        self._thread.join(timeout)
        if self._watchdog.ident is not None:
            self._watchdog.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            core = self.core = self._open_core(self.cancelled)
        except BaseException as error:
            self.load_error = error
            self._finish()
            return
        if self.cancelled.is_set():
            # Before `core` was there to be told.
            core.post(Command.CLOSE, 0.0)
        if self._step_timeout < threading.TIMEOUT_MAX:
            self._watchdog.start()
        self.opened.set()
        cause: BaseException | None = None
        try:
            self._serve(core)
        except BaseException as error:
            # Whatever it is, the streams must hear of it; there is nobody above to raise it to.
            cause = error
        if self.ended is None:
            self.ended = _closed if cause is None else _dead(cause)
        if cause is None:
            emit("engine_closed")
        else:
            emit("engine_dead", cause=repr(cause))
        try:
            core.fail_all(self.ended)
            core.runner.close()
        finally:
            if core.watch is not None:
                core.watch.close(self.ended())
            self._finish()

    def _serve(self, core: Core) -> None:
        look = 0.0
        while not core.done and self.ended is None:
            core.pump()
            if not core.busy and not core.done:
                core.wait_for_post(LOOK_EVERY)
            # Busy or not: the streams of one loop may be left behind while another's go on.
            if time.monotonic() >= look:
                look = time.monotonic() + LOOK_EVERY
                core.probe_loops()
                if not core.jobs.live and not self._home.probe():
                    self.ended = _orphaned

    def _finish(self) -> None:
        self._halt.set()
        atexit.unregister(self._at_exit)
        self.opened.set()
        self.closed.set()

    def _watch(self) -> None:
        """Tell the streams when a step hangs; the step itself cannot be interrupted."""
        core = self.core
        assert core is not None
        while not self._halt.wait(min(1.0, self._step_timeout / 4)):
            began = core.step_began
            if began is not None and time.monotonic() - began > self._step_timeout:
                cause = TimeoutError(f"a step ran longer than {self._step_timeout:g} s")
                self.ended = _dead(cause)
                emit("engine_dead", cause=repr(cause))
                core.abandon(self.ended)
                self.closed.set()
                return

    def _at_exit(self) -> None:
        if self.core is not None:
            self.core.post(Command.CLOSE, 0.0)
            self._thread.join(EXIT_TIMEOUT)


def _closed() -> AsyncInferError:
    return EngineClosed("the engine was closed")


def _orphaned() -> AsyncInferError:
    return EngineClosed(
        "the event loop that opened the engine was closed, and nobody could close the engine any "
        "more; open and use it within one run of a loop"
    )


def _dead(cause: BaseException) -> Callable[[], AsyncInferError]:
    def error() -> AsyncInferError:
        # One exception per stream: tracebacks are written into it where it is raised.
        dead = EngineDead(f"the decode loop ended: {cause!r}")
        dead.__cause__ = cause
        return dead

    return error
