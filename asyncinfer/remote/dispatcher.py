"""`Dispatcher`: which replicas are there, and which of them gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from asyncinfer.cache import BlockHasher
from asyncinfer.errors import AsyncInferError, EngineClosed, InvalidConfig
from asyncinfer.remote.link import Introduction, Link, News, ReplicaLost
from asyncinfer.remote.router import Route, Router, Routing

__all__ = ["Dispatcher"]

#: Seconds until a replica that was lost is asked again.
RETRY: Final = 0.2
#: Seconds after which a replica that tells nothing counts as lost.
SILENT: Final = 30.0
#: Characters or tokens of a prompt whose keys are made on the event loop, and of one that has keys:
#: a longer one is no reason to tokenise it twice.
AT_HAND: Final = 2048
MOST_KEYED: Final = 1 << 20


class Dispatcher:
    """Keeps in touch with replicas, each by a task that asks for its news: what its prefix cache
    holds, how it is, and whether it is there at all."""

    def __init__(self, routing: Routing) -> None:
        self.router = Router(routing)
        self.news: dict[str, News] = {}
        #: Replicas that cannot be reached, and why.
        self.lost: dict[str, Exception] = {}
        self._links: dict[str, Link] = {}
        #: Those that get no more requests: set once the last one has ended.
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        #: Calls of requests that wait for their replica, by its name.
        self._waiting: dict[str, set[asyncio.Task[Any]]] = {}
        #: Replicas that are opening, by the task that waits for each.
        self._opening: dict[asyncio.Task[Introduction], Link] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first: Introduction | None = None
        self._hasher: BlockHasher | None = None

    @property
    def replicas(self) -> list[str]:
        """Those that belong to it, lost ones included."""
        return list(self._links)

    @property
    def introduction(self) -> Introduction:
        """What the replicas are. Raises `EngineClosed` before the first has told."""
        if self._first is None:
            raise EngineClosed("the engine is not open: no replica has introduced itself")
        return self._first

    async def add(self, name: str, link: Link) -> None:
        """Take a replica in, once it is open. Raises what keeps it from that, and `EngineClosed`
        where `close` does."""
        if name in self._links:
            raise InvalidConfig("replica", name, "is there already")
        self._loop = asyncio.get_running_loop()
        opening: asyncio.Task[Introduction] = asyncio.ensure_future(link.call("introduce"))
        self._opening[opening] = link
        try:
            told = await opening
        except asyncio.CancelledError:
            if opening in self._opening:
                raise
            raise EngineClosed(f"{name}: closed while it was opening") from None
        finally:
            self._opening.pop(opening, None)
        self._admit(name, told)
        self._links[name] = link
        self._tasks[name] = asyncio.create_task(self._watch(name, link, told.life))

    async def remove(self, name: str, drain_timeout: float | None) -> None:
        """Send a replica no more requests, and close it once those that it has are done, or so
        many seconds have passed: its engine's own for None."""
        if name in self._leaving:
            raise InvalidConfig("replica", name, "is leaving already")
        place, done = self.router.left(name), asyncio.Event()
        self._leaving[name] = done
        seconds = self.introduction.drain_timeout if drain_timeout is None else drain_timeout
        if place is not None and place.requests:
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), seconds)
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        link = self._links.pop(name)
        for known in (self.lost, self.news, self._waiting):
            known.pop(name, None)
        del self._leaving[name]
        try:
            async with asyncio.timeout(SILENT):
                await link.call("close", 0.0)
        except TimeoutError:
            raise ReplicaLost(f"{name} did not close within {SILENT:g} s") from None

    async def close(self, drain_timeout: float | None) -> None:
        """Close all replicas, and those that are opening. Those that cannot be reached are left."""
        opening, self._opening = self._opening, {}
        for task, link in opening.items():
            task.cancel()
            self._tell(link, "close", 0.0)
        names = [name for name in self._links if name not in self._leaving]
        closed = [self.remove(name, drain_timeout) for name in names]
        for error in await asyncio.gather(*closed, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, ReplicaLost):
                raise error

    async def route(self, prompt: Any, options: Mapping[str, Any], session: str | None) -> Route:
        """Where a request goes; `end` says that it is over. Raises `Overloaded`, and
        `InvalidRequest` for a prompt that cannot be read."""
        if not self._links:
            raise EngineClosed("the engine is closed, or was never opened")
        return self.router.begin(await self._keys(prompt, options), session)

    def end(self, route: Route) -> None:
        """A request is over, however; to be called once."""
        self.router.end(route)
        if route.replica in self._leaving and not route.place.requests:
            self._leaving[route.replica].set()

    def link(self, route: Route) -> Link:
        """The way to a route's replica. Raises `ReplicaLost`."""
        if route.replica not in self._links:
            raise ReplicaLost(f"{route.replica} was removed")
        return self._links[route.replica]

    def call(self, route: Route, method: str, *args: Any) -> asyncio.Task[Any]:
        """What a request asks its replica. Cancelled where that is silent for too long. Raises
        `ReplicaLost`."""
        task: asyncio.Task[Any] = asyncio.ensure_future(self.link(route).call(method, *args))
        waiting = self._waiting.setdefault(route.replica, set())
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        return task

    def silent(self, route: Route) -> ReplicaLost:
        """Why a `call` was cancelled that nobody has cancelled."""
        return ReplicaLost(f"{route.replica} has said nothing for {SILENT:g} s")

    def send(self, route: Route, method: str, *args: Any) -> asyncio.Task[None]:
        """Tell a replica something. Nobody has to wait for the task."""
        return self._tell(self._links.get(route.replica), method, *args)

    def _tell(self, link: Link | None, method: str, *args: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(_sent(link, method, *args))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    def abort(self, route: Route, request_id: str) -> asyncio.Task[None]:
        """End a request at its replica. It counts there until that has confirmed it."""
        task = self.send(route, "abort", request_id)
        task.add_done_callback(lambda _: self.end(route))
        return task

    def drop(self, route: Route, request_id: str) -> None:
        """`abort` from any thread, for finalizers."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.abort, route, request_id)

    async def _keys(self, prompt: Any, options: Mapping[str, Any]) -> list[bytes]:
        hasher = self._hasher
        if hasher is None or self.router.routing != "prefix" or len(self._links) == 1:
            return []
        tokenizer, scope = self.introduction.tokenizer, options.get("cache_scope", "")
        of_chats = ("tools", "template_options", "continue_final_message")

        def make() -> list[bytes]:
            ids = prompt
            if isinstance(prompt, str):
                ids = tokenizer.encode(prompt)
            elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
                given = {name: options[name] for name in of_chats if name in options}
                ids = tokenizer.encode_chat(prompt, **given)
            if not isinstance(ids, list | tuple) or not all(map(_may_be_token, ids)):
                # The replica says what is wrong with it.
                return []
            return hasher.keys(ids, scope)

        chat = isinstance(prompt, list | tuple) and any(isinstance(one, Mapping) for one in prompt)
        size = len(prompt) if isinstance(prompt, str | list | tuple) else 0
        if size > MOST_KEYED or not isinstance(scope, str):
            return []
        if chat or size > AT_HAND:
            return await asyncio.to_thread(make)
        return make()

    async def _watch(self, name: str, link: Link, life: str) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT):
                    news = await link.call("news")
                if news.life != life:
                    # It began anew. What it has told belongs to the new life, and it gets no
                    # request before it is open.
                    self.router.left(name)
                    self.lost[name] = ReplicaLost("it is opening again")
                    told = await link.call("introduce")
                    self._admit(name, told)
                    life = told.life
            except Exception as error:  # Whatever it is, the replica does not serve.
                self.router.left(name)
                self.lost[name] = error
                if isinstance(error, TimeoutError):
                    # A link that knows that it is broken says so to whoever waits; this one may
                    # never.
                    for task in [*self._waiting.get(name, ())]:
                        task.cancel()
                if name in self._leaving:
                    self._leaving[name].set()
                life = ""
                await asyncio.sleep(RETRY)
                continue
            self.lost.pop(name, None)
            self.news[name] = news
            self.router.told(name, news.changes)

    def _admit(self, name: str, told: Introduction) -> None:
        first = self._first = self._first or told
        if told.prefixes != first.prefixes or told.model != first.model:
            bound = "must have the model, block size and prefix_secret of the others"
            raise InvalidConfig("replica", name, bound)
        if told.prefixes is not None and self._hasher is None:
            self._hasher = BlockHasher(*told.prefixes)
        if name not in self._leaving:
            self.router.joined(name, told.max_requests)


async def _sent(link: Link | None, method: str, *args: Any) -> None:
    """To a replica that is gone there is nothing to say."""
    with suppress(AsyncInferError, TimeoutError):
        if link is not None:
            async with asyncio.timeout(SILENT):
                await link.call(method, *args)


def _may_be_token(value: object) -> bool:
    """Whether keys can be made of it."""
    return type(value) is int and 0 <= value < 1 << 31
