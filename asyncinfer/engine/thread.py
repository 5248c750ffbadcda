"""The decode thread: loads the model, steps the core, and whatever ends it ends every stream."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from asyncinfer.engine import thread_errors
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.heap import trim_heap
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.loop_bridge import Latch, LoopBridge
from asyncinfer.engine.watchdog import Watchdog
from asyncinfer.errors import AsyncInferError, EngineClosed
from asyncinfer.plugins.supervision import call_in_progress, call_record, stack_of
from asyncinfer.runtime import Handle, Runtime
from asyncinfer.telemetry import emit

__all__ = ["DecodeThread"]

#: Seconds between looks whether anybody is left to work for.
LOOK_EVERY = 0.5
#: Only a prompt that takes this many seconds waits for others: the wait is a fiftieth of that.
LONG_PROMPT = 0.05
#: How long leaving the interpreter waits for the running step.
EXIT_TIMEOUT = 2.0


class _CancellationCheck:
    """The cancellation check of a decode thread: raises where opening was cancelled, and where the
    interpreter is left. It is called between parts of opening and layers of a step, which may take
    longer than `EXIT_TIMEOUT`. It refers to no engine, and setting a field takes no lock."""

    __slots__ = ("cancelled", "left", "opened")

    def __init__(self) -> None:
        self.cancelled = self.left = self.opened = False

    def __call__(self) -> None:
        if self.left:
            raise EngineClosed("the interpreter is being left")
        if self.cancelled and not self.opened:
            raise EngineClosed("opening the engine was cancelled")


class DecodeThread:
    """The worker around a `Core`, supervised. It holds no reference to the engine.

    `open_core` runs on the thread, so that loading a model blocks no event loop and only one thread
    touches the device. It is given the thread's cancellation check. `home` is the event loop that
    opened the engine. Once that is closed and nothing runs, nobody can close the engine, and the
    thread ends.
    """

    name = "asyncinfer-decode"

    def __init__(
        self,
        open_core: Callable[[Callable[[], None]], Core],
        home: LoopBridge,
        admission: Admission,
        runtime: Runtime,
        step_timeout: float,
    ) -> None:
        self.opened = Latch()
        self.closed = Latch()
        #: Why no request can be served any more; None while open.
        self.ended: Callable[[], AsyncInferError] | None = None
        #: `ended` where a turn hung, which may have come back since.
        self.hung: Callable[[], AsyncInferError] | None = None
        self.load_error: BaseException | None = None
        self.core: Core | None = None
        self._cancellation = _CancellationCheck()
        self._open_core = open_core
        self._home = home
        self._admission = admission
        self._runtime = runtime
        self._step_timeout = step_timeout
        self._thread: Handle | None = None
        self._watchdog: Watchdog | None = None
        self._watching: Handle | None = None
        self._look = 0.0

    def start(self) -> None:
        """Raises `EngineDead` if no thread can be started."""
        # A daemon thread that is inside torch while the interpreter tears down can crash it. Before
        # the start: a thread that fails at once takes it back.
        atexit.register(self._at_exit)
        try:
            self._thread = self._runtime.start(self)
        except RuntimeError as error:
            atexit.unregister(self._at_exit)
            raise thread_errors.no_thread(error) from error

    def opened_core(self) -> Core:
        """The core, once `opened` is set. Raises what kept it from being opened."""
        error = self.load_error
        if isinstance(error, EngineClosed):
            # A new error: what is raised refers to this frame, and so to the thread, which the
            # thread's own error must not.
            raise EngineClosed(str(error))
        if error is not None:
            self.load_error = thread_errors.without_traceback(error)
            try:
                raise error
            finally:
                del error
        assert self.core is not None
        return self.core

    def cancel_open(self) -> None:
        """Nobody waits for the engine any more: stop loading, or close what was opened. Takes no
        lock: a finalizer may call it."""
        self._cancellation.cancelled = True
        if self.load_error is None:
            self.load_error = EngineClosed("the engine was closed while it was being opened")
        if self.core is not None:
            self.core.post(Command.CLOSE, 0.0)
        self.opened.set()

    def notice_close(self) -> None:
        """Note that the admission drains, so that there is a time to end requests at."""
        if self._watchdog is not None:
            self._watchdog.notice()

    @property
    def alive(self) -> bool:
        """Whether one of the threads runs. A hanging decode thread may belong to nobody."""
        threads = (self._thread, self._watching)
        return any(thread is not None and thread.is_alive() for thread in threads)

    def join(self, timeout: float) -> bool:
        """Wait for both threads, `timeout` seconds for each; whether they ended."""
        for thread in (self._thread, self._watching):
            if thread is not None:
                thread.join(timeout)
        return not self.alive

    @property
    def ready(self) -> bool:
        return self.core is not None and not self.core.inbox.empty()

    def turn(self) -> float | None:
        core = self.core
        if core is None:
            return self._open()
        try:
            if self.ended is None and not core.done:
                core.step()
                # Busy or not: the streams of one loop may be left while another's go on.
                if self._runtime.clock() >= self._look:
                    self._look = self._runtime.clock() + LOOK_EVERY
                    core.probe_loops()
                    if not core.requests.live and not self._home.probe():
                        self.ended = thread_errors.orphaned
                idle = not core.busy and not core.done and self.ended is None
                return core.idle_until(LOOK_EVERY) if idle else 0.0
        except BaseException as error:
            # Streams must hear of any error, since this thread has no caller to raise it to.
            self._end(core, None if self._cancellation.left else error)
        else:
            self._end(core, None)
        return None

    def wait(self, seconds: float) -> None:
        if self.core is not None:
            inbox, prepare = self.core.inbox, self.core.runner.prepare
            clock = self._runtime.clock
            end = clock() + seconds
            while inbox.empty() and clock() < end and prepare():
                pass
            inbox.wait(max(0.0, end - clock()))
            # Else the first prompt of a burst would be computed alone, and all others beside its
            # answer, slowly.
            if self.core.scheduler.planner.pace.seconds(inbox.prompt_tokens) >= LONG_PROMPT:
                inbox.settle()

    def _open(self) -> float | None:
        try:
            core = self._open_core(self._cancellation)
            watchdog = Watchdog(
                core,
                self._admission,
                self._step_timeout,
                self._runtime.clock,
                self._hang,
                self._call,
            )
            try:
                self._watching = self._runtime.start(watchdog)
            except RuntimeError as error:
                refused = thread_errors.no_thread(error)
                core.discard(refused)
                try:
                    raise refused from error
                finally:
                    # The error's traceback refers to this frame.
                    del refused
        except BaseException as error:
            if self.load_error is None:
                self.load_error = thread_errors.not_opened(error)
            self._finish()
            return None
        self._cancellation.opened = True
        self.core, self._watchdog = core, watchdog
        if self._cancellation.cancelled:
            # The opening was cancelled before there was a `core` to be told.
            core.post(Command.CLOSE, 0.0)
        self.opened.set()
        return 0.0

    def _end(self, core: Core, cause: BaseException | None) -> None:
        watchdog = self._watchdog
        assert watchdog is not None
        if self.ended is None:
            self.ended = thread_errors.closed if cause is None else thread_errors.dead(cause)
        try:
            core.fail_all(self.ended)
            if cause is not None:
                emit("engine_dead", cause=repr(cause))
            elif self.hung is None:
                emit("engine_closed")
            core.close()
        finally:
            try:
                if core.events is not None:
                    # Observers may be waited for longer than a step may take.
                    core.events.close(self.ended(), watchdog.stop)
            finally:
                watchdog.stop()
                self._finish()

    def _finish(self) -> None:
        atexit.unregister(self._at_exit)
        # In this order: whoever waits for the opening may drop the engine at once.
        self.closed.set()
        self.opened.set()
        # Return the memory of the model and its requests. Only a joining caller waits for this.
        trim_heap()

    def _hang(self, why: str) -> None:
        """A turn hangs and cannot be interrupted: tell the streams. Runs on the watchdog."""
        core = self.core
        assert core is not None
        cause = TimeoutError(f"{why}{self.where()}")
        self.hung = thread_errors.dead(cause)
        if self.ended is None:
            self.ended = self.hung
        core.abandon(self.ended)
        self.closed.set()
        # Last: a handler may wait for the very thread that hangs.
        emit("engine_dead", cause=repr(cause))

    def _call(self) -> object:
        """The call into a plugin that the thread is in, see `Watchdog`."""
        ident = None if self._thread is None else self._thread.ident
        return None if ident is None else call_record(ident)

    def where(self) -> str:
        """What the thread is doing: the call into a plugin that it is in, if any, and its stack."""
        ident = None if self._thread is None else self._thread.ident
        if ident is None:
            return ""
        call = call_in_progress(ident)
        return f"{'' if call is None else f', in {call}'}:\n{stack_of(ident)}"

    def _at_exit(self) -> None:
        self.cancel_open()
        self._cancellation.left = True
        if self._thread is not None:
            self._thread.join(EXIT_TIMEOUT)
