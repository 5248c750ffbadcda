"""`Router` picks the replica of each request. Plain code: no clock, no I/O, no thread."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from asyncinfer.checks import check_choice, check_integer
from asyncinfer.errors import Overloaded

__all__ = ["ROUTINGS", "Route", "Router", "Routing"]

Routing = Literal["prefix", "load", "round-robin"]
ROUTINGS: Final[tuple[Routing, ...]] = ("prefix", "load", "round-robin")
#: What each running answer adds to the cost of a replica, in blocks of prompt to compute.
RUNNING: Final = 1
#: How much more a request's own missing block counts than a block of earlier requests: computing a
#: block twice delays all later requests, on either replica.
OWN: Final = 4
#: The most sessions that are remembered, the latest ones.
SESSIONS: Final = 65_536
#: The most blocks of a replica that are remembered without its news of them.
UNTOLD: Final = 65_536
#: By how many blocks a session's own replica may cost more than the cheapest one.
SLACK: Final = 32


class Place:
    """What the router knows of a replica, while it takes requests."""

    def __init__(self, replica: str, limit: int) -> None:
        self.replica = replica
        self.limit = limit
        #: Keys of the blocks that the replica's prefix cache holds, by its own news.
        self.held: set[bytes] = set()
        #: Keys of blocks that requests have computed there, the latest ones: the replica may not
        #: have reported them yet, or has reported already that it evicted them.
        self.computed: OrderedDict[bytes, None] = OrderedDict()
        #: Keys of blocks that running prompts compute there, each with the number of prompts.
        self.coming: Counter[bytes] = Counter()
        #: Requests there, and the blocks that these have to compute.
        self.requests = self.missing = 0

    def hits(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks the replica has, or is about to have."""
        for found, key in enumerate(keys):
            if key not in self.held and key not in self.coming and key not in self.computed:
                return found
        return len(keys)

    def note_computed(self, keys: Iterable[bytes]) -> None:
        """Note that a request has computed these blocks."""
        for key in keys:
            if key not in self.held:
                self.computed[key] = None
                self.computed.move_to_end(key)
        while len(self.computed) > UNTOLD:
            self.computed.popitem(last=False)

    def told(self, key: bytes, held: bool) -> None:
        """Note the replica's news of a block."""
        self.computed.pop(key, None)
        if held:
            self.held.add(key)
        else:
            self.held.discard(key)


@dataclass(slots=True, eq=False)
class Route:
    """A request at a replica, from `Router.begin` to `Router.end`."""

    place: Place
    #: Chain keys of the prompt's full blocks.
    keys: Sequence[bytes]
    #: Leading blocks that the replica had or was about to have.
    hits: int
    #: Blocks that are still to be computed; 0 from the first token on.
    missing: int
    #: Whether its prompt is computed.
    computed: bool = False

    @property
    def replica(self) -> str:
        return self.place.replica


class Router:
    """Sends each request to the replica that computes its prompt soonest, judged by the blocks of
    the prompt that the replica lacks, and by the blocks that earlier requests still compute there.

    That is "prefix". "load" counts every block as missing, and "round-robin" ignores all costs. A
    session stays on its replica as long as that costs little more.

    A full replica gets no request. Replicas report which blocks they hold by chain keys, which
    prefix caches with one secret have in common."""

    def __init__(self, routing: Routing = "prefix") -> None:
        """Raises `InvalidRequest`."""
        check_choice("routing", routing, ROUTINGS)
        self.routing = routing
        self._replicas: dict[str, Place] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._turn = 0

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas that take requests."""
        return list(self._replicas)

    def requests(self, replica: str) -> int:
        """Requests at a replica."""
        known = self._replicas.get(replica)
        return 0 if known is None else known.requests

    def joined(self, replica: str, limit: int) -> None:
        """Add a replica with an empty cache. It takes `limit` requests at once."""
        check_integer("limit", limit, 1)
        self._replicas[replica] = Place(replica, limit)

    def left(self, replica: str) -> Place | None:
        """Send a replica no more requests. Returns what is known of it, if it was there."""
        return self._replicas.pop(replica, None)

    def back(self, place: Place) -> None:
        """Send a replica requests again, beside those that it still has. News of its cache may have
        been lost, so nothing is known of that."""
        place.held.clear()
        place.computed.clear()
        self._replicas[place.replica] = place

    def told(self, replica: str, changes: Iterable[tuple[bytes, bool]]) -> None:
        """Note a replica's news: keys, each with whether its prefix cache holds that block now."""
        known = self._replicas.get(replica)
        if known is None:
            return
        for key, held in changes:
            known.told(key, held)

    def check_free(self) -> dict[str, Place]:
        """The replicas that take a request now, by name. Raises `Overloaded` if none does."""
        free = {name: one for name, one in self._replicas.items() if one.requests < one.limit}
        if not free:
            why = "all replicas are full" if self._replicas else "no replica is up"
            raise Overloaded(f"{why}; try again later")
        return free

    def begin(self, keys: Sequence[bytes], session: str | None = None) -> Route:
        """Pick the replica of a request whose prompt has these keys. Raises `Overloaded`."""
        free = self.check_free()
        name = self._choose(free, keys, session)
        if session is not None:
            self._note(session, name)
        place = free[name]
        hits = place.hits(keys)
        route = Route(place, keys, hits, len(keys) - hits)
        place.coming.update(keys)
        place.requests += 1
        place.missing += route.missing
        return route

    def started(self, route: Route) -> None:
        """Note that the request has its first token: its prompt is computed."""
        route.place.missing -= route.missing
        route.missing = 0
        route.computed = True

    def end(self, route: Route) -> None:
        """Note that the request has ended, for whatever reason. Called once. Its computed blocks
        count as held until the replica reports their eviction."""
        place = route.place
        place.missing -= route.missing
        place.requests -= 1
        if route.computed:
            place.note_computed(route.keys)
        for key in route.keys:
            place.coming[key] -= 1
            if not place.coming[key]:
                del place.coming[key]

    def forked(self, session: str, made: str) -> None:
        """Note a forked session, which goes where its origin went last."""
        if session in self._sessions:
            self._note(made, self._sessions[session])

    def _note(self, session: str, replica: str) -> None:
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def _choose(self, free: dict[str, Place], keys: Sequence[bytes], session: str | None) -> str:
        self._turn += 1
        names = list(free)
        if self.routing == "round-robin":
            return names[self._turn % len(names)]
        costs = {
            name: one.missing
            + RUNNING * one.requests
            + OWN * (len(keys) - one.hits(keys) if self.routing == "prefix" else 0)
            for name, one in free.items()
        }
        least = min(costs.values())
        before = None if session is None else self._sessions.get(session)
        if before in costs and costs[before] <= least + SLACK:
            return before
        cheapest = [name for name in names if costs[name] == least]
        # In turns, so that ties do not always pick the same replica.
        return cheapest[self._turn % len(cheapest)]
