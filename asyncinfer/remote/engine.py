"""`RemoteEngine`: several replicas, used like one engine."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import anyio

from asyncinfer.bounds import MAX_DEADLINE
from asyncinfer.checks import check_real, check_seconds, check_string, checking_config
from asyncinfer.chunk import Completion
from asyncinfer.engine import (
    Embeddings,
    EngineTokenizer,
    ModelInfo,
    Pin,
    Score,
    Session,
    open_session,
)
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import DeadlineExceeded, EngineClosed, InvalidConfig
from asyncinfer.params import SamplingParams
from asyncinfer.remote.dispatcher import Dispatcher
from asyncinfer.remote.hold import RemoteHold, RemoteMessages
from asyncinfer.remote.link import Link
from asyncinfer.remote.options import check_names, read_params, time_left
from asyncinfer.remote.router import Routing
from asyncinfer.remote.stream import GRACE, RemoteStream
from asyncinfer.stats import EngineHealth, EngineStats

__all__ = ["RemoteEngine"]


class RemoteEngine(Uncopied):
    """Engines in other processes, with the methods of an `Engine`; each request goes to one of
    them. asyncio only, on one event loop.

    A session stays on one replica, as far as its load allows, and a pin is on one replica. Adapters
    are not supported. Objects among the options must be importable at the replica.

    Args:
        links: a link to each replica, by name. All have the same model and `prefix_secret`.
        routing: "prefix", "load" or "round-robin": see `Router`.
    """

    def __init__(self, links: Mapping[str, Link], *, routing: Routing = "prefix") -> None:
        """Raises `InvalidConfig`."""
        with checking_config():
            self._dispatcher = Dispatcher(routing)
        if not links:
            raise InvalidConfig("links", links, "must name a replica at least")
        self._links = dict(links)
        self._entered = False
        # Request ids are unique, since replicas may have other callers before and after this one.
        self._prefix, self._numbers = f"req-{secrets.token_hex(4)}", count(1)

    async def __aenter__(self) -> RemoteEngine:
        """Open all replicas, once. Raises what keeps one of them from opening."""
        if self._entered:
            raise EngineClosed("an engine is opened once; make another")
        self._entered = True
        try:
            await self._open()
        except BaseException:
            self._entered = False
            raise
        return self

    async def _open(self) -> None:
        self._dispatcher.open()
        try:
            async with asyncio.TaskGroup() as group:
                for name, link in self._links.items():
                    group.create_task(self.add(name, link))
        except BaseExceptionGroup as failed:
            await self.aclose(drain_timeout=0.0)
            raise failed.exceptions[0] from None
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self.aclose(drain_timeout=0.0)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain_timeout=None if kind is None else 0.0)

    async def aclose(self, *, drain_timeout: float | None = None) -> None:
        """Close all replicas, as `Engine.aclose` does."""
        if drain_timeout is not None:
            with checking_config():
                check_seconds("drain_timeout", drain_timeout)
        await self._dispatcher.close(drain_timeout)

    async def add(self, name: str, link: Link) -> None:
        """Add one more replica. Raises what keeps it from opening, `InvalidConfig` where it differs
        from the others or one has its name, and `EngineClosed` once the engine is closed."""
        await self._dispatcher.add(name, link)

    async def remove(self, name: str, *, drain_timeout: float | None = None) -> None:
        """Remove and close a replica: it gets no more requests, and its running ones have
        `drain_timeout` seconds. Raises `InvalidConfig`, also for an unknown name."""
        if drain_timeout is not None:
            with checking_config():
                check_seconds("drain_timeout", drain_timeout)
        if name not in self._dispatcher.replicas:
            raise InvalidConfig("replica", name, f"must be one of {self._dispatcher.replicas}")
        await self._dispatcher.remove(name, drain_timeout)

    def stream(self, prompt: Any, *, session: str | None = None, **options: Any) -> RemoteStream:
        """As `Engine.stream`, with its options. Requests of one `session` go to one replica, as far
        as its load allows. Raises `InvalidRequest` for bad options here."""
        params = read_params(options)
        if session is not None:
            check_string("session", session)
        hold = prompt.hold if isinstance(prompt, RemoteMessages) else None
        if hold is not None and session is None:
            session = hold.held.name
        return RemoteStream(
            self._dispatcher, self._next_id(), prompt, options, session, params.json_reader, hold
        )

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """The whole answer at once; options as for `stream`. Cancelling it aborts the request."""
        return await self.stream(prompt, **options)

    async def embed(self, texts: Sequence[Any], **options: Any) -> Embeddings:
        """As `Engine.embed`, all texts on one replica."""
        found: Embeddings = await self._whole("embed", [texts], options)
        return found

    async def score(
        self, prompt: Any, continuations: Sequence[str | Sequence[int]], **options: Any
    ) -> list[Score]:
        """As `Engine.score`."""
        found: list[Score] = await self._whole("score", [prompt, continuations], options)
        return found

    async def best_of(self, prompt: Any, **options: Any) -> Completion:
        """As `Engine.best_of`."""
        found: Completion = await self._whole("best_of", [prompt], options)
        return found

    async def beam_search(self, prompt: Any, **options: Any) -> Completion:
        """As `Engine.beam_search`."""
        found: Completion = await self._whole("beam_search", [prompt], options)
        return found

    def session(
        self,
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        system: str | None = None,
        ttl: float | None = None,
        **options: Any,
    ) -> Session:
        """As `Engine.session`. The replica that gave the last answer keeps the blocks. If it is
        lost or overloaded, another replica gives the next answer, to the same tokens, since the
        conversation is kept here."""
        told = self._dispatcher.check_open()
        eos_ids = told.tokenizer.eos_ids if told.model.has_chat_template else None
        hold = RemoteHold(self._dispatcher, ttl)
        return open_session(self.stream, eos_ids, messages, system, options, hold)

    def pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        cache_scope: str = "",
        adapter: str | None = None,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Pin:
        """As `Engine.pin`, on one replica. Routing by prefix sends requests that begin with the
        prompt there. The pins of a lost replica are lost, too."""
        options: dict[str, Any] = {"cache_scope": cache_scope, "adapter": adapter, "tools": tools}
        options |= {"template_options": template_options, "priority": priority}
        options["deadline"] = deadline
        read_params(options)
        self._dispatcher.check_open()
        hold = RemoteHold(self._dispatcher, ttl)

        async def compute() -> int:
            return int(await self._call("pin", prompt, [prompt], options, hold))

        return Pin(compute, hold)

    @property
    def default_params(self) -> SamplingParams:
        """See `Engine.default_params`. Raises `EngineClosed` before a replica is open."""
        return self._dispatcher.introduction.default_params

    @property
    def tokenizer(self) -> EngineTokenizer:
        """See `Engine.tokenizer`: a copy in this process. Raises as `default_params`."""
        return self._dispatcher.introduction.tokenizer

    @property
    def model(self) -> ModelInfo:
        """See `Engine.model`. Raises as `default_params`."""
        return self._dispatcher.introduction.model

    @property
    def limits(self) -> dict[str, int]:
        """`max_requests` of each replica by its name, lost ones included."""
        return dict(self._dispatcher.limits)

    def stats(self) -> EngineStats:
        """The sums of the counters that replicas reported last."""
        told = [news.stats for news in self._dispatcher.news.values()]
        sums: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(EngineStats)):
            start: Any = () if isinstance(getattr(EngineStats(), name), tuple) else 0
            sums[name] = sum([getattr(each, name) for each in told], start=start)
        return EngineStats(**sums)

    def health(self) -> EngineHealth:
        """ "open" where all replicas are, "degraded" where some are not (`reasons` names them), and
        "dead" where none is."""
        dispatcher = self._dispatcher
        if not dispatcher.replicas:
            return EngineHealth("closed", ("it was not opened, or is closed",))
        reasons = [f"{name}: {error}" for name, error in dispatcher.lost.items()]
        for name, news in dispatcher.news.items():
            if name not in dispatcher.lost and news.health.state != "open":
                told = "; ".join(news.health.reasons) or news.health.state
                reasons.append(f"{name}: {told}")
        if all(name in dispatcher.lost for name in dispatcher.router.replicas):
            return EngineHealth("dead", tuple(reasons), next(iter(dispatcher.lost.values()), None))
        return EngineHealth("degraded" if reasons else "open", tuple(reasons))

    def _next_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    async def _whole(self, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        check_names(method, options)
        # Texts to embed are several prompts, which go to one replica.
        prompt = "" if method == "embed" else args[0]
        return await self._call("whole", prompt, [method, args], options)

    async def _call(
        self,
        method: str,
        prompt: Any,
        args: Sequence[Any],
        options: Mapping[str, Any],
        hold: RemoteHold | None = None,
    ) -> Any:
        """The whole answer of another method, from a replica that suits the prompt."""
        dispatcher, request_id = self._dispatcher, self._next_id()
        deadline = options.get("deadline")
        if deadline is not None:
            seconds = check_real("deadline", deadline, 0.0, MAX_DEADLINE, open_low=True)
            deadline = time.monotonic() + seconds
        route = await dispatcher.route(prompt, options, None)
        try:
            left = None
            if deadline is not None:
                left = time_left(deadline, request_id)
                options = {**options, "deadline": left}
            held = () if hold is None else (hold.at(route),)
            call = dispatcher.call(route, method, request_id, *args, options, *held)
            try:
                await asyncio.wait([call], timeout=None if left is None else left + GRACE)
                if not call.done():
                    raise DeadlineExceeded(f"{request_id}: the replica did not end it in time")
            finally:
                if call.cancel() or call.cancelled():
                    dispatcher.send(route, "abort", request_id)
            if call.cancelled():
                raise dispatcher.gone(route)
            result = call.result()
            dispatcher.router.started(route)
            return result
        finally:
            dispatcher.end(route)
