"""`Replica`: an engine that other processes call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final

import anyio

from asyncinfer.chunk import Chunk, Completion
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Engine, Hold, Pin, SpokenMessages, Stream
from asyncinfer.errors import EngineClosed, InvalidRequest
from asyncinfer.plugins import cache_policies
from asyncinfer.remote.link import (
    Begun,
    Held,
    Introduction,
    News,
    ReplicaLost,
    SentChunk,
    Taken,
)
from asyncinfer.remote.told import ToldPolicy

__all__ = ["Replica"]

#: The most chunks that one call takes.
MOST_TAKEN: Final = 256
#: Seconds without a call for news after which a replica ends its requests and releases its
#: sessions: their client is gone.
LEASE: Final = 60.0
#: Seconds for which news is gathered before it is returned.
GATHERED: Final = 0.05
#: Methods of the engine that `whole` may call.
_CALLS: Final = frozenset({"embed", "score", "best_of", "beam_search"})


class Replica:
    """An engine, called by one `RemoteEngine`. Its methods take and return plain data. asyncio
    only, on one event loop.

    `take` reads all chunks that a stream has. The engine's own buffer bounds them, and pauses an
    answer whose consumer is slow."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        """The arguments of `Engine`. Raises as it does."""
        config = EngineConfig(**options)
        self._told = ToldPolicy(cache_policies.resolve(config.cache_policy))
        self._engine = Engine(model, config=config.replace(cache_policy=self._told))
        self._life = secrets.token_hex(8)
        self._opened: asyncio.Task[Engine] | None = None
        self._streams: dict[str, Stream] = {}
        self._calls: dict[str, asyncio.Task[Any]] = {}
        #: Holds of sessions, and pins, by name.
        self._holds: dict[str, Hold] = {}
        self._pins: dict[str, Pin] = {}
        self._ending: list[asyncio.Task[None]] = []
        self._lease: asyncio.TimerHandle | None = None

    @property
    def requests(self) -> list[str]:
        """Ids of the running requests."""
        return [*self._streams, *self._calls]

    async def introduce(self) -> Introduction:
        """Open the engine if it is not open, and describe it. Raises `ModelLoadError`."""
        if self._opened is None:
            self._opened = asyncio.create_task(self._engine.__aenter__())
            # Retrieves the exception, in case every waiting caller has left.
            self._opened.add_done_callback(lambda task: task.cancelled() or task.exception())
        engine = await asyncio.shield(self._opened)
        config, secret = engine.config, engine.config.prefix_secret
        known = config.prefix_cache and secret is not None
        return Introduction(
            life=self._life,
            tokenizer=engine.tokenizer,
            model=engine.model,
            default_params=engine.default_params,
            max_requests=config.max_requests,
            drain_timeout=config.drain_timeout,
            prefixes=(config.block_size, secret) if known and secret is not None else None,
        )

    async def begin(
        self, request_id: str, prompt: Any, options: Mapping[str, Any], held: Held | None = None
    ) -> Begun:
        """Begin a stream, whose prompt is kept as `held` says. Raises what entering `Engine.stream`
        raises."""
        if isinstance(prompt, SpokenMessages):
            conversation = None if held is None else self._hold(held).conversation
            prompt = SpokenMessages(prompt, prompt.answered, conversation)
        stream = self._streams[request_id] = self._engine.stream(prompt, **options)
        try:
            await stream.__aenter__()
        except BaseException:
            self._streams.pop(request_id, None)
            raise
        if request_id not in self._streams:
            await stream.aclose()
        ids = prompt.prompt_ids if isinstance(prompt, SpokenMessages) else ()
        return Begun(stream.prompt_tokens, ids)

    async def take(self, request_id: str) -> Taken:
        """Wait for a chunk, and take all chunks that are there. Raises what the stream raises."""
        stream = self._stream(request_id)
        pieces: list[SentChunk] = []
        try:
            pieces.append(_piece(await anext(stream)))
            with anyio.move_on_after(0):
                while len(pieces) < MOST_TAKEN:
                    pieces.append(_piece(await anext(stream)))
        except StopAsyncIteration:
            if not pieces:
                self._streams.pop(request_id, None)
                return Taken((), await stream)
        except Exception:
            # Chunks drawn before an error are returned before the error.
            if not pieces:
                self._streams.pop(request_id, None)
                raise
        return Taken(pieces)

    async def finish(self, request_id: str) -> Completion:
        """The whole answer of a stream. Raises what the stream raises."""
        try:
            return await self._stream(request_id)
        finally:
            self._streams.pop(request_id, None)

    async def stop(self, request_id: str) -> None:
        """Stop an answer, keeping its text, if it is there."""
        if request_id in self._streams:
            self._streams[request_id].stop()

    async def abort(self, request_id: str) -> None:
        """Abort a request, if it is there."""
        stream, task = self._streams.pop(request_id, None), self._calls.pop(request_id, None)
        if task is not None:
            task.cancel()
        if stream is not None:
            await stream.aclose()

    async def whole(
        self, request_id: str, method: str, args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """The result of another method of the engine. Raises what the method raises."""
        if method not in _CALLS:
            raise InvalidRequest("method", method, f"must be one of {sorted(_CALLS)}")
        return await self._run(request_id, getattr(self._engine, method)(*args, **options))

    async def pin(
        self, request_id: str, prompt: Any, options: Mapping[str, Any], held: Held | None
    ) -> int:
        """Pin a prompt until `release`, and return its number of tokens. Without `held` the prompt
        is only computed. Raises what `Engine.pin` raises."""
        pin = self._engine.pin(prompt, ttl=None if held is None else held.ttl, **options)
        if held is not None:
            # Stored first, since the pin may be released before its prompt is computed.
            self._pins[held.name] = pin
        try:
            await self._run(request_id, pin.__aenter__())
        except BaseException:
            if held is not None:
                self._pins.pop(held.name, None)
            raise
        return pin.prompt_tokens

    async def keep(self, held: Held) -> None:
        """Keep a forked conversation until `release`."""
        self._hold(held)

    async def wait_for_tool(self, name: str) -> None:
        """Note that a conversation waits for the result of a tool, if it is there."""
        if name in self._holds:
            self._holds[name].wait_for_tool()

    async def release(self, name: str) -> None:
        """Keep a conversation or a pinned prompt no longer."""
        for kept in (self._holds.pop(name, None), self._pins.pop(name, None)):
            if kept is not None:
                kept.close()

    async def news(self) -> News:
        """What has changed, gathered for a moment. This call keeps requests alive: see `LEASE`."""
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(LEASE, self._expire)
        await asyncio.sleep(GATHERED)
        engine = self._engine
        return News(self._life, self._told.changes(), engine.stats(), engine.health())

    async def close(self, drain_timeout: float | None = None) -> None:
        """Close the engine, as `Engine.aclose` does."""
        if self._lease is not None:
            self._lease.cancel()
        self._let_go()
        await self._engine.aclose(drain_timeout=drain_timeout)

    async def _run(self, request_id: str, work: Awaitable[Any]) -> Any:
        """The result of `work`, unless the request is aborted."""
        call = self._calls[request_id] = asyncio.ensure_future(work)
        try:
            return await call
        finally:
            self._calls.pop(request_id, None)

    def _hold(self, held: Held) -> Hold:
        hold = self._holds.get(held.name)
        if hold is None:
            origin = self._holds.get(held.origin or "")
            hold = self._engine.hold(held.ttl) if origin is None else origin.fork()
            self._holds[held.name] = hold
        return hold

    def _let_go(self) -> None:
        kept: list[Hold | Pin] = [*self._holds.values(), *self._pins.values()]
        self._holds.clear()
        self._pins.clear()
        for each in kept:
            each.close()

    def _stream(self, request_id: str) -> Stream:
        if request_id not in self._streams:
            if self._engine.health().state in ("closed", "draining"):
                raise EngineClosed(f"{request_id}: the replica was closed")
            raise ReplicaLost(f"{request_id}: the replica has begun anew, or ended the request")
        return self._streams[request_id]

    def _expire(self) -> None:
        """End all requests and release all sessions, since the caller is gone."""
        self._let_go()
        self._ending = [
            asyncio.ensure_future(self.abort(request_id)) for request_id in self.requests
        ]


def _piece(chunk: Chunk) -> SentChunk:
    # A plain chunk, since one of a message refers to the texts of all chunks before it.
    return SentChunk(Chunk(*chunk), chunk.reasoning, chunk.tool_calls)
