"""Where a router sends requests."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from asyncinfer.errors import InvalidRequest, Overloaded
from asyncinfer.remote import ROUTINGS, Route, Router, Routing
from asyncinfer.remote import router as router_module
from asyncinfer.remote.router import SLACK


def keys(*blocks: int) -> list[bytes]:
    return [block.to_bytes(4, "little") for block in blocks]


def router(routing: Routing = "prefix", *, limit: int = 100, replicas: str = "ab") -> Router:
    made = Router(routing)
    for name in replicas:
        made.joined(name, limit)
    return made


def serve(one: Router, wanted: list[bytes], session: str | None = None) -> str:
    """A request from its beginning to its end, which leaves its blocks behind."""
    route = one.begin(wanted, session)
    one.started(route)
    one.told(route.replica, [(key, True) for key in wanted])
    one.end(route)
    return route.replica


def test_a_prompt_goes_where_its_beginning_is() -> None:
    one = router()
    first = serve(one, keys(1, 2, 3))
    other = serve(one, keys(7, 8, 9))
    for _ in range(4):
        assert serve(one, keys(1, 2, 3, 4)) == first
    # The same block after another beginning has another key: only leading ones count.
    route = one.begin(keys(5, 2, 3))
    assert (route.hits, route.missing) == (0, 3)
    one.end(route)
    # What was computed counts as there before the replica tells of it.
    told = one.begin(keys(7, 8, 9, 10))
    assert (told.replica, told.hits) == (other, 3)
    one.started(told)
    one.end(told)
    assert one.begin(keys(7, 8, 9, 10)).hits == 4
    one.told(first, [(key, False) for key in keys(1, 2, 3, 4)])
    one.told(other, [(key, True) for key in keys(1, 2, 3, 4)])
    assert serve(one, keys(1, 2, 3, 4)) == other


def test_what_a_replica_never_tells_of_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have told that the blocks went before their request ended."""
    monkeypatch.setattr(router_module, "UNTOLD", 8)
    one = router(replicas="a")
    for number in range(100):
        route = one.begin(keys(3 * number, 3 * number + 1, 3 * number + 2))
        one.started(route)
        one.told("a", [(key, held) for key in route.keys for held in (True, False)])
        one.end(route)
    place = route.place
    assert (len(place.held), len(place.computed), len(place.coming)) == (0, 8, 0)
    assert one.begin(keys(297, 298, 299)).hits == 3


def test_what_is_on_its_way_counts_as_there() -> None:
    """Requests that come together with the same long beginning compute it once."""
    one = router()
    beginning = keys(*range(100))
    routes = [one.begin([*beginning, *keys(200 + i)]) for i in range(20)]
    assert {route.replica for route in routes} == {routes[0].replica}
    assert [route.missing for route in routes] == [101, *[1] * 19]
    for route in routes:
        one.end(route)
    # None of them has told that it left anything.
    assert one.begin(beginning).hits == 0


def test_load_outweighs_a_short_beginning() -> None:
    one = router()
    first = serve(one, keys(1))
    busy = [one.begin(keys(1, *range(10 * i, 10 * i + 9))) for i in range(2, 8)]
    assert Counter(route.replica for route in busy).keys() == {"a", "b"}
    assert busy[0].replica == first
    for route in busy:
        one.started(route)
        one.end(route)
    assert one.requests("a") == one.requests("b") == 0


def test_a_session_stays_where_it_was_unless_that_is_much_dearer() -> None:
    one = router()
    place = serve(one, keys(1), "talk")
    (other,) = {"a", "b"} - {place}
    one.told(other, [(key, True) for key in keys(1, 2, 3)])
    assert serve(one, keys(1, 2, 3), "talk") == place
    held = [one.begin(keys(*range(100, 101 + SLACK)))]
    while held[-1].replica != place:
        held.append(one.begin(keys(*range(1000 * len(held), 1000 * len(held) + 2 * SLACK))))
    if len(held) > 1:
        one.end(held.pop(0))
    assert serve(one, keys(1, 2, 3), "talk") == other


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_replica_that_is_full_or_gone_gets_nothing(routing: Routing) -> None:
    one = router(routing, limit=2)
    routes = [one.begin(keys(1)) for _ in range(4)]
    assert Counter(route.replica for route in routes) == {"a": 2, "b": 2}
    with pytest.raises(Overloaded, match="all replicas are full"):
        one.begin(keys(1))
    one.left("a")
    for route in routes:
        one.end(route)
    assert {serve(one, keys(1)) for _ in range(4)} == {"b"}
    one.left("b")
    with pytest.raises(Overloaded, match="no replica is up"):
        one.begin(keys(1))


def test_one_that_comes_back_holds_nothing_and_owes_nothing() -> None:
    one = router(replicas="a")
    serve(one, keys(1, 2))
    before = one.begin(keys(1, 2, 3))
    one.left("a")
    one.told("a", [(key, True) for key in keys(9)])
    one.joined("a", 1)
    after = one.begin(keys(1, 2))
    assert after.hits == 0
    # The end of a request of its former life is none of this one's.
    one.end(before)
    assert one.requests("a") == 1
    with pytest.raises(Overloaded):
        one.begin(keys(4))
    one.end(after)
    assert one.requests("a") == 0


def test_requests_are_spread_in_turns() -> None:
    one = router("round-robin", replicas="abc")
    assert Counter(one.begin(keys(1)).replica for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_bad_routings_are_named() -> None:
    with pytest.raises(InvalidRequest, match="routing='fastest'"):
        Router("fastest")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="limit=0"):
        Router().joined("a", 0)


def test_nothing_is_left_of_requests_that_ended(seed: int) -> None:
    """Whatever comes in whatever order, with replicas that come and go."""
    rng, one = Random(seed), router(replicas="abcd", limit=8)
    open_routes: list[Route] = []
    for _ in range(3000):
        roll = rng.random()
        if roll < 0.5:
            depth, program = rng.randrange(6), rng.randrange(4)
            wanted = keys(*(program * 10 + i for i in range(depth)))
            try:
                open_routes.append(one.begin(wanted, rng.choice((None, "x", "y"))))
            except Overloaded:
                assert all(one.requests(name) == 8 for name in one.replicas)
        elif open_routes and roll < 0.9:
            route = open_routes.pop(rng.randrange(len(open_routes)))
            one.started(route)
            one.end(route)
        elif roll < 0.93 and one.replicas:
            one.left(rng.choice(one.replicas))
        elif roll < 0.96:
            gone = sorted({*"abcd"} - {*one.replicas})
            if gone:
                one.joined(gone[0], 8)
        else:
            one.told("a", [(key, rng.random() < 0.5) for key in keys(*range(40))])
    places = {id(route.place): route.place for route in open_routes}
    for route in open_routes:
        one.end(route)
    for place in places.values():
        assert (place.requests, place.missing, len(place.coming)) == (0, 0, 0), f"seed {seed}"
