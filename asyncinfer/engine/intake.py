"""`Intake`: has requests prepared, off the event loop where that may take long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.end_errors import named_failure
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.preparer import INLINE_TOKENS, EndedMeanwhile, Preparer
from asyncinfer.engine.prompt_reader import message_chars
from asyncinfer.engine.prompt_workers import PromptWorkers
from asyncinfer.engine.request import Phase, Request
from asyncinfer.engine.turn_limit import TurnLimits
from asyncinfer.errors import Overloaded
from asyncinfer.runtime import Runtime
from asyncinfer.text import panicked

__all__ = ["Intake"]


class Intake:
    """Has requests prepared and hands them to the decode thread. Long prompts go to daemon
    threads, so that neither an event loop nor the exit of the interpreter waits for them.

    A request that ends meanwhile is dropped: at once while it waits, else between two phases of its
    preparation. Its place is taken until then.
    """

    def __init__(
        self, core: Core, config: EngineConfig, admission: Admission, runtime: Runtime
    ) -> None:
        self._core = core
        self._admission = admission
        self._preparer = Preparer(core, config, admission)
        self._workers = PromptWorkers(runtime)
        self._turns = TurnLimits()

    async def take_in(self, request: Request, prompt: Any, wanted_until: float | None) -> None:
        """Prepare an admitted request and hand it on. Returns also where the request has ended
        meanwhile: the request's buffer tells the end, after all that is left to read. Raises
        `InvalidRequest` and `Overloaded`; after any error the request is gone. Scheduling policies
        see `wanted_until`: the deadline of the request, or that of the caller's cancel scope."""
        if self._at_hand(request, prompt):
            await self._in_line(request)
            self.prepare_here(request, prompt, wanted_until)
        else:
            work = partial(self.prepare_here, request, prompt, wanted_until)
            size = max(_size(prompt), _size(request.options.prediction))
            await self._on_worker(request, work, size)

    def _at_hand(self, request: Request, prompt: Any) -> bool:
        """Whether the request is prepared on the event loop. Raises as `take_in` does."""
        try:
            return self._preparer.at_hand(request, prompt)
        except BaseException as error:
            if self._is_to_be_told(request, error):
                raise
            return True

    def prepare_here(self, request: Request, prompt: Any, wanted_until: float | None) -> None:
        """`take_in` on the calling thread, from now to the end. Drops a request that has ended."""
        try:
            if not request.ended:
                self._preparer.prepare(request, prompt, wanted_until)
        except EndedMeanwhile:
            pass
        except BaseException as error:
            if self._is_to_be_told(request, error):
                if panicked(error) and not isinstance(error, Exception):
                    raise named_failure(request, error) from error
                raise
        if self._admission.advance(request, Phase.QUEUED):
            self._core.post(Command.SUBMIT, request)
        else:
            self._drop(request)

    def close(self) -> None:
        """Let the threads end after what they do now. Waits for nothing."""
        self._workers.close()

    @property
    def alive(self) -> bool:
        """Whether one of the threads runs."""
        return self._workers.alive

    async def _in_line(self, request: Request) -> None:
        """Wait until the event loop has time for a short prompt."""
        buffer = request.buffer
        try:
            await self._turns.wait(buffer, lambda: buffer.outcome)
        except GeneratorExit:
            # A finalizer takes no lock: the decode thread ends the request and frees its place.
            self._core.post(Command.ABORT, request)
            self._core.post(Command.RELEASE, request)
            raise
        except BaseException:
            self._cancelled(request)
            self._drop(request)
            raise

    async def _on_worker(self, request: Request, work: Callable[[], None], size: int) -> None:
        buffer = request.buffer
        failed: list[BaseException] = []
        done = left = False

        def task() -> None:
            nonlocal done
            try:
                work()
            except BaseException as error:
                failed.append(error)
            done = True
            if left:
                failed.clear()
            buffer.bridge.post(buffer.bridge.wake, buffer)

        try:
            self._workers.give(task, size)
        except Overloaded as error:
            self._admission.overloaded(request, error)
            raise
        except BaseException:
            self._admission.refuse(request)
            raise
        try:
            await buffer.wait_for(lambda: done or buffer.outcome)
        except GeneratorExit:
            # A finalizer takes no lock: the worker gives the place back when it comes to the task.
            self._core.post(Command.ABORT, request)
            raise
        except BaseException:
            self._cancelled(request)
            self._take_back(request, task)
            raise
        else:
            if not done:
                self._take_back(request, task)
            if failed and buffer.outcome is None:
                raise failed.pop()
        finally:
            # The error's traceback refers to frames that would keep the request alive.
            left = True
            failed.clear()

    def _take_back(self, request: Request, task: Callable[[], None]) -> None:
        """Drop the task of a request that has ended, unless a worker has it."""
        if self._workers.drop(task):
            self._drop(request)

    def _is_to_be_told(self, request: Request, error: BaseException) -> bool:
        """Whether a failed preparation ends the request, so that its consumer is told `error`. A
        consumer whose request has ended hears of that end alone, like log and observers."""
        if self._admission.refuse(request):
            return True
        if panicked(error):
            return False
        self._drop(request)
        return True

    def _cancelled(self, request: Request) -> None:
        """End a request whose consumer was cancelled."""
        if self._admission.withdraw(request) is None:
            self._core.post(Command.ABORT, request)
        else:
            self._admission.told((request,))

    def _drop(self, request: Request) -> None:
        """Give back the place of a request that has ended before the decode thread took it over."""
        # The place is given back after the post: whatever ends the engine meanwhile finds the
        # request either in its place or in the inbox.
        self._core.post(Command.RELEASE, request)
        self._admission.leave(request)


def _size(prompt: Any) -> int:
    """Characters or tokens, roughly, by which the prompt's worker is chosen."""
    if not isinstance(prompt, str | list | tuple):
        return 0
    if len(prompt) < INLINE_TOKENS and not isinstance(prompt, str):
        return max(len(prompt), message_chars(prompt))
    return len(prompt)
