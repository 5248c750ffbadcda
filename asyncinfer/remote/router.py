"""`Router`: which replica of a model a request goes to. Plain code: no clock, no I/O, no thread."""

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
#: What a running answer costs a request beside it, in blocks of its prompt to compute.
RUNNING: Final = 1
#: How much more a block of its own prompt counts for a request than one of those before it: what is
#: computed twice delays all that come later, on either replica.
OWN: Final = 4
#: Sessions that are remembered, the last ones.
SESSIONS: Final = 65_536
#: Blocks of a replica that are remembered though it has told nothing of them.
UNTOLD: Final = 65_536
#: Blocks that a session's own replica may be dearer than the cheapest.
SLACK: Final = 32


class Place:
    """What the router knows of a replica, from when it joins until it leaves."""

    def __init__(self, replica: str, limit: int) -> None:
        self.replica = replica
        self.limit = limit
        #: Keys of the blocks that its prefix cache holds, as it has told.
        self.held: set[bytes] = set()
        #: Keys that requests have computed there, the last ones: the replica may not have told of
        #: them yet, or has told already that they went.
        self.computed: OrderedDict[bytes, None] = OrderedDict()
        #: Keys of the blocks that requests on their way bring there, with their number.
        self.coming: Counter[bytes] = Counter()
        #: Requests there, and the blocks that they have to compute.
        self.requests = self.missing = 0

    def hits(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that it has, or is about to have."""
        for found, key in enumerate(keys):
            if key not in self.held and key not in self.coming and key not in self.computed:
                return found
        return len(keys)

    def note_computed(self, keys: Iterable[bytes]) -> None:
        """A request has computed these blocks there."""
        for key in keys:
            if key not in self.held:
                self.computed[key] = None
                self.computed.move_to_end(key)
        while len(self.computed) > UNTOLD:
            self.computed.popitem(last=False)

    def told(self, key: bytes, held: bool) -> None:
        """The replica tells whether it has a block."""
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
    #: Leading blocks that were there, or about to be.
    hits: int
    #: Blocks that are still to be computed; 0 from the first token on.
    missing: int
    #: Whether its prompt is computed.
    computed: bool = False

    @property
    def replica(self) -> str:
        return self.place.replica


class Router:
    """Sends each request to where it is computed soonest: the blocks of its prompt that a replica
    lacks, and those that requests before it still have to compute there.

    "prefix" counts so. "load" takes no block for one that is there, and "round-robin" takes one
    replica after the other. A session stays where it was as long as that costs little.

    A replica that is full, or has left, gets nothing. What a replica holds is what it tells, by the
    chain keys that prefix caches of one secret have in common."""

    def __init__(self, routing: Routing = "prefix") -> None:
        """Raises `InvalidRequest`."""
        check_choice("routing", routing, ROUTINGS)
        self.routing = routing
        self._replicas: dict[str, Place] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._turn = 0

    @property
    def replicas(self) -> list[str]:
        """Those that are there."""
        return list(self._replicas)

    def requests(self, replica: str) -> int:
        """Requests at a replica."""
        known = self._replicas.get(replica)
        return 0 if known is None else known.requests

    def joined(self, replica: str, limit: int) -> None:
        """A replica is there, and holds nothing. It takes `limit` requests at once."""
        check_integer("limit", limit, 1)
        self._replicas[replica] = Place(replica, limit)

    def left(self, replica: str) -> Place | None:
        """A replica gets no more requests. Returns what is known of it, if it was there."""
        return self._replicas.pop(replica, None)

    def told(self, replica: str, changes: Iterable[tuple[bytes, bool]]) -> None:
        """The replica's prefix cache now holds the blocks of these keys, or no longer, in order."""
        known = self._replicas.get(replica)
        if known is None:
            return
        for key, held in changes:
            known.told(key, held)

    def check_free(self) -> dict[str, Place]:
        """Those that take a request now, by name. Raises `Overloaded` if none does."""
        free = {name: one for name, one in self._replicas.items() if one.requests < one.limit}
        if not free:
            why = "all replicas are full" if self._replicas else "no replica is up"
            raise Overloaded(f"{why}; try again later")
        return free

    def begin(self, keys: Sequence[bytes], session: str | None = None) -> Route:
        """Where a request goes whose prompt has these keys. Raises `Overloaded`."""
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
        """The request has its first token: its prompt is computed."""
        route.place.missing -= route.missing
        route.missing = 0
        route.computed = True

    def end(self, route: Route) -> None:
        """The request has ended, however; to be called once. What it has computed is there until
        the replica tells that it went."""
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
        """A session begins as another one is, and goes where that one went last."""
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
        # In turns, so that a tie does not always fall on the first.
        return cheapest[self._turn % len(cheapest)]
