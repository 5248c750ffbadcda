"""`Consumer`: a task that reads one answer as an application would, and checks what it is given."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from asyncinfer.chunk import Chunk, Usage
from asyncinfer.errors import AsyncInferError
from asyncinfer.protocols import SamplerPlugin
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.simulator.expected import Expected
from asyncinfer.testing.simulator.formats import FORMATS
from asyncinfer.testing.simulator.scenario import Ask

if TYPE_CHECKING:
    from asyncinfer.engine import SessionStream, Stream
    from asyncinfer.testing.simulator.engine import SimulatedEngine

__all__ = ["Consumer"]


class Marker:
    """Something that only a request's context holds."""

    __slots__ = ("__weakref__",)


#: What a request's copy of its caller's context keeps alive.
_MARK: ContextVar[Marker] = ContextVar("asyncinfer_simulated_request")


class OwnError(Exception):
    """Raised by a consumer's body."""


class Consumer:
    """One task on one loop. `outcome` is how it ended: "whole", "left", "cancelled", "raised", or
    the name of the error it was given; None before."""

    def __init__(
        self,
        engine: SimulatedEngine,
        ask: Ask,
        prompt: Any,
        expected: Expected | None,
        leaving: dict[int, None],
        samplers: Sequence[SamplerPlugin] | None = None,
        begin: Callable[..., Stream | SessionStream] | None = None,
    ) -> None:
        """`expected` is None where the request must be refused. As its task ends, it puts its id
        into `leaving`. `begin` stands in for `Engine.stream`."""
        self.ask = ask
        self.outcome: str | None = None
        self.message = ""
        #: The engine's name for it.
        self.request_id = "unsent"
        #: The usage of its request; None before the end.
        self.usage: Usage | None = None
        #: What it was given, by answer.
        self.tokens: list[list[int]] = [[] for _ in range(ask.n)]
        self.texts = [""] * ask.n
        self.reasons: list[str | None] = [None] * ask.n
        self.stop_reasons: list[str | int | None] = [None] * ask.n
        #: When it began, and took something.
        self.began = 0.0
        self.reads: list[float] = []
        #: When the engine ended it, in seconds from its beginning.
        self.seconds = 0.0
        #: Whether it waits for the engine, and when that wait must end.
        self.waiting = False
        self.limit = float("inf")
        #: Whether it began before the engine was open, whether its stream was stopped, and whether
        #: another task closed it.
        self.early = False
        self.stopped = False
        self.closed = False
        #: Times that it gave up waiting for a chunk, and then waited again.
        self.retries = 0
        self.stream: Stream | SessionStream | None = None
        self.task: asyncio.Task[None] | None = None
        self.expected = expected
        self._engine = engine
        self._begin = begin
        self._leaving = leaving
        self._prompt = prompt
        self._samplers = samplers
        self._marker: weakref.ref[Marker] | None = None

    @property
    def held(self) -> bool:
        """Whether anything holds the request's context."""
        return self._marker is not None and self._marker() is not None

    def leave_by(self, when: float) -> None:
        """Note the time by which it must have left: it was told to leave, or has a deadline."""
        self.limit = min(self.limit, when)

    def let_go(self) -> None:
        """Hold nothing that it asked with any more."""
        self._prompt = self._begin = None

    async def run(self) -> None:
        """The task."""
        try:
            await self._serve()
        except asyncio.CancelledError:
            # It ends here, as at the top of a program's own task.
            self.outcome = "cancelled"
        except OwnError:
            self.outcome = "raised"
        except AsyncInferError as error:
            self.outcome, self.message = type(error).__name__, str(error)
        finally:
            self.waiting = False
            stream, self.stream = self.stream, None
            if stream is not None and self.ask.then != "drop":
                self.request_id = stream.request_id
                self.usage = stream.usage
                self.seconds = stream.timings.total if stream.timings else 0.0
            self.let_go()
            self._leaving[self.ask.id] = None

    async def _serve(self) -> None:
        ask = self.ask
        self.began = asyncio.get_running_loop().time()
        if self.expected is not None:
            self.expected.begin()
        if ask.deadline is not None:
            self.leave_by(self.began + ask.deadline)
        self.early = self._engine.core is None
        marker = Marker()
        self._marker = weakref.ref(marker)
        _MARK.set(marker)
        del marker
        begin = self._engine.stream if self._begin is None else self._begin
        stream = self.stream = begin(
            self._prompt,
            priority=ask.priority,
            deadline=ask.deadline,
            cache_scope=ask.scope,
            adapter=ask.adapter,
            buffer=ask.buffer,
            on_full=ask.on_full,
            max_tokens=ask.max_tokens,
            min_tokens=ask.min_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            n=ask.n,
            stop=tuple(ask.stop),
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
            bad_words=_WORDS if ask.form == "worker" else (),
            sampler=self._samplers,
            guidance_scale=1.0 if ask.guidance is None else ask.guidance,
            negative_prompt=tuple(ask.negative) or None,
            **({} if ask.format is None else FORMATS[ask.format]),
        )
        self.request_id = stream.request_id
        if ask.how == "await":
            await self._complete(stream)
        elif ask.then == "drop":
            # Nobody but this frame holds it, so that it is collected where the frame lets go.
            self.stream = None
            await self._read(stream)
            del stream
            self.outcome = self.outcome or "left"
        else:
            self.waiting = True
            async with stream:
                self.waiting = False
                await self._read(stream)
                if ask.how == "both" and self.outcome is None:
                    await self._complete(stream)
                self.waiting = True
            self.outcome = self.outcome or "left"

    async def _complete(self, stream: Stream | SessionStream) -> None:
        self.waiting = True
        completion = await stream
        self.waiting = False
        for choice in completion.choices:
            self.tokens[choice.index] = list(choice.token_ids)
            self.texts[choice.index] = choice.text
            self.reasons[choice.index] = choice.finish_reason
            self.stop_reasons[choice.index] = choice.stop_reason
        self.usage = completion.usage
        self.outcome = "whole"

    async def _read(self, stream: Stream | SessionStream) -> None:
        ask, left = self.ask, self.ask.chunks
        while left is None or left > 0:
            self.waiting = True
            try:
                if ask.patience is None:
                    chunk = await anext(stream)
                else:
                    async with asyncio.timeout(ask.patience):
                        chunk = await anext(stream)
            except StopAsyncIteration:
                self.outcome = "whole" if None not in self.reasons else "left"
                return
            except TimeoutError as error:
                if isinstance(error, AsyncInferError):
                    # The request's own deadline.
                    raise
                self.retries += 1
                continue
            finally:
                self.waiting = False
            self._take(chunk, stream)
            if left is not None:
                left -= 1
            if ask.pace:
                await asyncio.sleep(ask.pace)
        if ask.then == "stop":
            self.stopped = True
            stream.stop()
            await self._rest(stream)
        elif ask.then == "raise":
            raise OwnError
        elif ask.then == "sleep":
            await asyncio.sleep(1e9)

    async def _rest(self, stream: Stream | SessionStream) -> None:
        """Read on to the end."""
        self.waiting = True
        async for chunk in stream:
            self._take(chunk, stream)
        self.waiting = False
        self.outcome = "whole"

    def _take(self, chunk: Chunk, stream: Stream | SessionStream) -> None:
        index = chunk.index
        hold("I7", self.reasons[index] is None, "{}: a chunk after the last one", self)
        self.tokens[index] += chunk.token_ids
        self.texts[index] += chunk.text
        self.reads.append(asyncio.get_running_loop().time())
        self.reasons[index], self.stop_reasons[index] = chunk.finish_reason, chunk.stop_reason
        if self.expected is not None:
            self.expected.check_chunk(self, index, ended=stream.usage is not None)

    def __repr__(self) -> str:
        return f"<request {self.ask.id} {self.request_id} {self.outcome or 'open'}>"


#: So many that an intake thread tokenises them.
_WORDS = ("hhhhhhhh", "gggggggg", "ffffffff", "eeeeeeee", "dddddddd")
