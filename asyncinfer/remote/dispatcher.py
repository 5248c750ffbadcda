"""`Dispatcher` knows which replicas are alive, and picks the one that gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import anyio

from asyncinfer.cache import BlockHasher
from asyncinfer.errors import EngineClosed, InvalidConfig
from asyncinfer.remote.link import Introduction, Link, News, ReplicaLost
from asyncinfer.remote.outbox import Outbox
from asyncinfer.remote.prompt_keys import PromptKeys
from asyncinfer.remote.router import Place, Route, Router, Routing

__all__ = ["Dispatcher"]

#: Seconds until a lost replica is asked again.
RETRY: Final = 0.2
#: Seconds without news after which a replica counts as lost.
SILENT: Final = 30.0


class Leaving(NamedTuple):
    """A replica that gets no more requests."""

    #: Set once its requests are over, or must end.
    hurry: asyncio.Event
    #: Ends once the replica is closed.
    task: asyncio.Task[None]


class Dispatcher:
    """Stays in touch with replicas. For each of them a task asks for news: what its prefix cache
    holds, its counters, and whether it answers at all."""

    def __init__(self, routing: Routing) -> None:
        self.router = Router(routing)
        self.news: dict[str, News] = {}
        #: Replicas that cannot be reached, each with the error.
        self.lost: dict[str, Exception] = {}
        #: How many requests each replica holds at once.
        self.limits: dict[str, int] = {}
        self._links: dict[str, Link] = {}
        self._leaving: dict[str, Leaving] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outbox = Outbox()
        #: What is known of replicas that are lost, and may be back.
        self._away: dict[str, Place] = {}
        #: Calls of requests that wait for a replica's answer, by the replica's name.
        self._waiting: dict[str, set[asyncio.Task[Any]]] = {}
        #: Names and links of replicas that are opening, by the task that waits for each.
        self._opening: dict[asyncio.Task[Introduction], tuple[str, Link]] = {}
        self._first: Introduction | None = None
        self._closed = False
        self._keys: PromptKeys | None = None

    @property
    def replicas(self) -> list[str]:
        """Names of all replicas, lost ones included."""
        return list(self._links)

    @property
    def introduction(self) -> Introduction:
        """What the first replica told about itself. Raises `EngineClosed` before there is one."""
        if self._first is None:
            raise EngineClosed("the engine is not open: no replica has introduced itself")
        return self._first

    def open(self) -> None:
        """Let replicas be added, also after a `close`."""
        self._closed = False

    async def add(self, name: str, link: Link) -> None:
        """Add a replica once it is open. Raises what keeps it from opening, and `EngineClosed` if
        `close` does."""
        if name in self._links or any(name == other for other, _ in self._opening.values()):
            raise InvalidConfig("replica", name, "is there already")
        if self._closed:
            raise EngineClosed("the engine is closed")
        self._outbox.opened()
        opening: asyncio.Task[Introduction] = asyncio.ensure_future(link.call("introduce"))
        self._opening[opening] = name, link
        try:
            told = await opening
            # `close` may have come in the turn in which it opened.
            if opening in self._opening:
                self._admit(name, told)
        except BaseException:
            if self._opening.pop(opening, None) is not None:
                # The replica may be open already, or open later.
                self._tell(link, "close", 0.0)
                raise
        if self._opening.pop(opening, None) is None:
            raise EngineClosed(f"{name}: closed while it was opening")
        self._links[name] = link
        self._tasks[name] = asyncio.create_task(self._watch(name, link, told.life))

    async def remove(self, name: str, drain_timeout: float | None) -> None:
        """Send a replica no more requests, and close it once its requests are done, or after
        `drain_timeout` seconds; None: the engine's own time. A cancelled call closes it at once."""
        if name in self._leaving:
            raise InvalidConfig("replica", name, "is leaving already")
        leaving = self._leave(name)
        await self._wait([leaving], drain_timeout)
        await leaving.task

    async def close(self, drain_timeout: float | None) -> None:
        """Close all replicas, also those that are opening or leaving, and give up unreachable ones.
        A cancelled call closes them at once."""
        self._closed = True
        if self._keys is not None:
            self._keys.close()
            self._keys = None
        opening, self._opening = self._opening, {}
        for task, (_, link) in opening.items():
            task.cancel()
            self._tell(link, "close", 0.0)
        leaving = [self._leaving.get(name) or self._leave(name) for name in self._links]
        await self._wait(leaving, drain_timeout)
        for each in leaving:
            with suppress(ReplicaLost):
                await each.task
        await self._outbox.emptied()

    def _leave(self, name: str) -> Leaving:
        place, hurry = self.router.left(name) or self._away.get(name), asyncio.Event()
        if place is None or not place.requests:
            hurry.set()
        leaving = Leaving(hurry, asyncio.create_task(self._remove(name, hurry)))
        self._leaving[name] = leaving
        return leaving

    async def _wait(self, leaving: Iterable[Leaving], drain_timeout: float | None) -> None:
        """Wait until replicas are closed. Their requests have `drain_timeout` seconds, or none
        where the caller is cancelled."""
        tasks = [each.task for each in leaving]
        if not tasks:
            return
        seconds = self.introduction.drain_timeout if drain_timeout is None else drain_timeout
        try:
            await asyncio.wait(tasks, timeout=seconds)
        finally:
            for each in leaving:
                each.hurry.set()
            # `SILENT` bounds this wait.
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)

    async def _remove(self, name: str, hurry: asyncio.Event) -> None:
        await hurry.wait()
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        link = self._links.pop(name)
        waiting = self._waiting.pop(name, set())
        for known in (self.lost, self.news, self.limits, self._away):
            known.pop(name, None)
        try:
            async with asyncio.timeout(SILENT):
                await link.call("close", 0.0)
        except TimeoutError:
            raise ReplicaLost(f"{name} did not close within {SILENT:g} s") from None
        finally:
            # A closed replica answers none of these calls.
            _cancel(waiting)
            self._leaving.pop(name, None)

    def check_open(self) -> Introduction:
        """What the replicas are. Raises `EngineClosed` without a replica."""
        if not self._links:
            raise EngineClosed("the engine is closed, or was never opened")
        return self.introduction

    async def route(self, prompt: Any, options: Mapping[str, Any], session: str | None) -> Route:
        """Pick the replica of a request; `end` must follow. Raises `Overloaded`, and
        `InvalidRequest` for a prompt that cannot be read."""
        self.check_open()
        # Checked first, so that a refused prompt is not tokenised.
        self.router.check_free()
        keys: list[bytes] = []
        if self._keys is not None and self.router.routing == "prefix" and len(self._links) > 1:
            keys = await self._keys.of(prompt, options)
        return self.router.begin(keys, session)

    def end(self, route: Route) -> None:
        """Note that a request is over, for whatever reason. Called once."""
        self.router.end(route)
        if route.replica in self._leaving and not route.place.requests:
            self._leaving[route.replica].hurry.set()

    def link(self, route: Route) -> Link:
        """The link to a route's replica. Raises as `gone` says."""
        if route.replica not in self._links:
            raise self.gone(route)
        return self._links[route.replica]

    def call(self, route: Route, method: str, *args: Any) -> asyncio.Task[Any]:
        """Call a method of a request's replica. The call is cancelled if the replica is silent for
        too long. Raises as `gone` says."""
        task: asyncio.Task[Any] = asyncio.ensure_future(self.link(route).call(method, *args))
        waiting = self._waiting.setdefault(route.replica, set())
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        return task

    def gone(self, route: Route) -> EngineClosed | ReplicaLost:
        """Why a replica answers no more, or why `call` was cancelled though its caller was not."""
        if route.replica not in self._links:
            if self._closed:
                return EngineClosed("the engine is closed")
            return ReplicaLost(f"{route.replica} was removed")
        error = self.lost.get(route.replica)
        if isinstance(error, ReplicaLost):
            return ReplicaLost(f"{route.replica}: {error}")
        return ReplicaLost(f"{route.replica} has said nothing for {SILENT:g} s")

    def send(self, route: Route, method: str, *args: Any) -> asyncio.Task[None]:
        """Call a method of a replica whose result nobody needs; the task need not be awaited."""
        return self._tell(self._links.get(route.replica), method, *args)

    def _tell(self, link: Link | None, method: str, *args: Any) -> asyncio.Task[None]:
        return self._outbox.tell(link, SILENT, method, *args)

    def abort(self, route: Route, request_id: str) -> asyncio.Task[None]:
        """End a request at its replica. It counts as running there until the replica confirms."""
        task = self.send(route, "abort", request_id)
        task.add_done_callback(lambda _: self.end(route))
        return task

    def drop(self, route: Route, request_id: str, call: asyncio.Task[Any] | None) -> None:
        """`abort` from any thread, for finalizers. Nobody waits for the request's `call`."""
        if call is not None:
            self._outbox.soon(call.cancel)
        self._outbox.soon(self.abort, route, request_id)

    def post(self, route: Route, method: str, *args: Any) -> None:
        """`send` from any thread. Does nothing for a replica that was closed."""
        if route.replica in self._links:
            self._outbox.soon(self.send, route, method, *args)

    async def _watch(self, name: str, link: Link, life: str) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT):
                    news = await link.call("news")
                if news.life != life:
                    # A restarted replica reports the cache of its new life. It gets requests once
                    # it is open.
                    self.router.left(name)
                    self._away.pop(name, None)
                    self.lost[name] = ReplicaLost("it has begun anew, and is opening")
                    # The last life of the replica never answers these calls.
                    _cancel(self._waiting.get(name, ()))
                    async with asyncio.timeout(SILENT):
                        told = await link.call("introduce")
                    self._admit(name, told)
                    life = told.life
                elif (place := self._away.pop(name, None)) and name not in self._leaving:
                    # Its requests went on meanwhile.
                    self.router.back(place)
            except Exception as error:  # After any error the replica serves no requests.
                if (place := self.router.left(name)) is not None:
                    self._away[name] = place
                # A single call may fail; a replica that fails twice holds nobody up.
                if name in self._leaving and name in self.lost:
                    self._leaving[name].hurry.set()
                self.lost[name] = error
                if isinstance(error, TimeoutError):
                    # A link that knows it is broken fails its calls itself. A silent one may never
                    # do so.
                    _cancel(self._waiting.get(name, ()))
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
        if told.prefixes is not None and self._keys is None:
            self._keys = PromptKeys(told.tokenizer, BlockHasher(*told.prefixes))
        self.limits[name] = told.max_requests
        if name not in self._leaving:
            self.router.joined(name, told.max_requests)


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    # A copy, since a task that ends leaves the set.
    for task in [*tasks]:
        task.cancel()
