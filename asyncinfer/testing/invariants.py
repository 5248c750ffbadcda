"""What always holds between two calls of a `Scheduler`, as I1 to I12: messages begin with these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from asyncinfer.cache.chain import TOKEN_BYTES, pack
from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.scheduler import Scheduler

__all__ = ["InvariantError", "check_drained", "check_invariants", "hold"]


class InvariantError(AssertionError):
    """An invariant of the scheduler or the cache does not hold; the message begins with its
    number."""


def check_invariants(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Check everything. `requests` are all that were added and not yet forgotten, ended ones
    included. Cost: linear in blocks and tables.

    Raises:
        InvariantError: something does not hold.
    """
    requests = list(requests)
    seated = [request for request in requests if request.slot >= 0]
    _check_places(scheduler, requests)
    _check_slots(scheduler, seated)
    _check_references(scheduler, seated)
    _check_tables(scheduler, seated)
    _check_flights(scheduler)
    _check_windows(scheduler, seated)
    if scheduler.cache is not None:
        _check_cache(scheduler, seated)
    _check_bounds(scheduler)


def check_drained(scheduler: Scheduler) -> None:
    """Nothing is left: no request anywhere, no block in use."""
    hold("drain", not scheduler.has_work and not scheduler.paused, "work is left")
    pool = scheduler.roster.seats.blocks.pool
    hold("drain", not any(pool.refs), "blocks are in use")
    held = scheduler.blocks_free + scheduler.blocks_cached
    hold("drain", held == scheduler.blocks_total, "blocks are lost")
    windows = scheduler.roster.seats.blocks.windows
    if windows is not None:
        hold("drain", not any(windows.pool.refs), "window pages are in use")
        hold("drain", windows.available == scheduler.spec.window_pages, "window pages are lost")


def _check_places(scheduler: Scheduler, requests: list[Request]) -> None:
    roster, state = scheduler.roster, RequestState
    seen: set[int] = set()
    for name, members, allowed in (
        ("queue", [*roster.queue], (state.WAITING,)),
        ("following", [*roster.following.requests.values()], (state.WAITING,)),
        ("prefilling", [*roster.prefilling.values()], (state.RUNNING,)),
        ("decoding", [*roster.decoding.values()], (state.RUNNING,)),
        ("paused", [*roster.paused.values()], (state.PAUSED,)),
        ("leaving", [*roster.leaving.values()], (state.LEAVING, state.FINISHED)),
    ):
        for r in members:
            hold("I8", r.id not in seen, "{} is in {} and elsewhere", r, name)
            hold("I8", r.state in allowed, "{} is in {}", r, name)
            seen.add(r.id)
    hold("I8", len(roster.queue) == len([*roster.queue]), "the queue miscounts")
    for r in requests:
        if r.state is not state.FINISHED:
            hold("I8", r.id in seen, "{} is lost", r)
        if r.state is state.WAITING or (r.state is state.FINISHED and r.id not in seen):
            hold(
                "I6", r.slot < 0 and not r.blocks, "{} owns slot {}, blocks {}", r, r.slot, r.blocks
            )
    hold("I8", len(seen) <= len(requests), "a stranger is on the roster")
    for r in roster.leaving.values():
        hold("I6", r.in_flight > 0, "{} is leaving, but nothing holds it", r)
    for r in roster.following.requests.values():
        leader = r.following
        alive = (state.WAITING, state.RUNNING, state.LEAVING)
        hold("I9", leader is not None and leader.state in alive, "{} follows {}", r, leader)


def _check_slots(scheduler: Scheduler, seated: list[Request]) -> None:
    seats = scheduler.roster.seats
    for request in seated:
        hold("I8", seats.tenants[request.slot] is request, "{} is not in its slot", request)
    taken = sum(tenant is not None for tenant in seats.tenants)
    hold("I8", taken == len(seated), "a slot has a tenant that does not know it")
    free = {slot for slot, tenant in enumerate(seats.tenants) if tenant is None}
    hold("I8", sorted(seats.free) == sorted(free), "free slots are not those without a tenant")


def _check_references(scheduler: Scheduler, seated: list[Request]) -> None:
    pool = scheduler.roster.seats.blocks.pool
    uses = [0] * len(pool.refs)
    for block in chain(
        *(request.blocks for request in seated), *(flight.pins for flight in scheduler.flights)
    ):
        uses[block] += 1
    wrong = [block for block, refs in enumerate(pool.refs) if refs != uses[block]]
    hold("I1", not wrong, "blocks {}: references are not their uses", wrong)
    cache = scheduler.cache
    evictable = {} if cache is None else cache.guard.evictable
    free = set(pool.free)
    hold("I2", len(free) == len(pool.free), "a block is on the free list twice")
    unused = {block for block, refs in enumerate(pool.refs) if not refs}
    hold("I2", not free & evictable.keys(), "a block is free and cached")
    hold("I2", free | evictable.keys() == unused, "unused blocks are not those free or cached")


def _check_tables(scheduler: Scheduler, seated: list[Request]) -> None:
    size = scheduler.spec.block_size
    chunks = Counter[int]()
    for flight in scheduler.flights:
        for request, count in zip(flight.requests, flight.plan.counts, strict=True):
            chunks[request.id] += count
    for r in seated:
        hold("I3", len(set(r.blocks)) == len(r.blocks), "{} has a block twice", r)
        hold("I4", r.room == len(r.blocks) * size, "{}: room {}", r, r.room)
        hold("I4", len(r.blocks) <= -(-r.known // size), "{} has {} blocks", r, len(r.blocks))
        hold("I4", r.committed <= r.computed <= min(r.known, r.room), "{}: {}", r, r.computed)
        if r.state is not RequestState.FINISHED:
            hold("I4", r.computed - r.committed == chunks[r.id], "{} lost a chunk", r)
            hold("I4", r.left >= 0, "{} draws too many tokens", r)
            hold("I4", len(r.tokens) <= r.known, "{} has tokens nobody drew", r)


def _check_flights(scheduler: Scheduler) -> None:
    pool = scheduler.roster.seats.blocks.pool
    in_flight = Counter(r.id for flight in scheduler.flights for r in flight.requests)
    for flight in scheduler.flights:
        plan = flight.plan
        for row, request in enumerate(flight.requests):
            hold("I11", request.slot == plan.slots[row], "{} lost its slot in flight", request)
            known = request.in_flight == in_flight[request.id]
            hold("I11", known, "{} miscounts its flights", request)
            end = plan.starts[row] + plan.counts[row]
            used = request.blocks[: -(-end // scheduler.spec.block_size)]
            hold("I11", request.room >= end, "{} lost blocks in flight", request)
            for block in used:
                hold("I11", pool.refs[block] > 0, "block {} is free, but in flight", block)
        for source, target in plan.copies:
            used_twice = pool.refs[source] > 0 and pool.refs[target] > 0
            hold("I11", used_twice, "copy {} -> {} is free", source, target)


def _check_windows(scheduler: Scheduler, seated: list[Request]) -> None:
    """I1, I2, I3, I5 and I11 of window pages, and that nobody has more than it can see."""
    windows, cache = scheduler.roster.seats.blocks.windows, scheduler.cache
    if windows is None:
        return
    size, refs = windows.block_size, windows.pool.refs
    uses = Counter(page for r in seated for page in r.pages[r.passed :])
    uses.update(page for flight in scheduler.flights for page in flight.page_pins)
    for page, count in enumerate(refs):
        hold("I1", count == uses[page], "page {}: {} references, {} uses", page, count, uses[page])
    free = set(windows.pool.free)
    hold("I2", len(free) == len(windows.pool.free), "a window page is on the free list twice")
    unused = {page for page, count in enumerate(refs) if not count}
    kept = windows.unused.keys() | windows.passed.keys()
    hold("I2", windows.cached == len(kept), "a window page is kept twice")
    hold("I2", not free & kept, "a window page is free and kept")
    hold("I2", free | kept == unused, "unused pages are not those free or kept")
    hold("I5", kept <= windows.keeper.keys(), "an unused page is nobody's")
    pairs = {(page, block) for block, page in windows.kept.items()}
    hold("I5", pairs == set(windows.keeper.items()), "pages and their blocks differ")
    published = set() if cache is None else cache.by_block.keys()
    hold("I5", windows.kept.keys() <= published, "a page is kept for a block that is gone")
    for r in seated:
        held = r.pages[r.passed :]
        hold("I3", len(r.pages) == len(r.blocks), "{}: {} pages", r, len(r.pages))
        hold("I3", len(set(held)) == len(held), "{} has a window page twice", r)
        hold("I3", all(page >= 0 for page in held), "{} lacks a window page", r)
        hold("I3", all(page < 0 for page in r.pages[: r.passed]), "{} has a page it passed", r)
        hold("I3", r.passed <= windows.first(r.committed), "{} lost what it sees", r)
        # Given back block by block: the window, and the chunks in flight.
        chunks = len(r.blocks) - r.committed // size
        hold("I3", len(held) <= windows.reach + chunks, "{} has {} window pages", r, len(held))
    for flight in scheduler.flights:
        for row, r in enumerate(flight.requests):
            seen = windows.first(flight.plan.starts[row])
            hold("I11", r.passed <= seen, "{} lost window pages in flight", r)
        for source, target in flight.plan.copied_pages:
            used_twice = refs[source] > 0 and refs[target] > 0
            hold("I11", used_twice, "window page copy {} -> {} is free", source, target)


def _check_cache(scheduler: Scheduler, seated: list[Request]) -> None:
    cache, size = scheduler.cache, scheduler.spec.block_size
    assert cache is not None
    by_block = cache.by_block
    hold("I5", len(cache.by_key) == len(by_block), "keys and blocks differ in number")
    children = Counter(id(entry.parent) for entry in cache.by_key.values())
    for key, entry in cache.by_key.items():
        right = (
            entry.key == key
            and by_block.get(entry.block) is entry
            and len(entry.data) == size * TOKEN_BYTES
            and entry.children == children.get(id(entry), 0)
        )
        hold("I5", right, "block {}: its key, tokens or children are wrong", entry.block)
    for r in seated:
        above: object = None
        data = pack(r.tokens)
        for j, block in enumerate(r.blocks):
            found = by_block.get(block)
            if found is not None:
                hold("I5", (j + 1) * size <= r.committed, "{}: block {} is not written", r, block)
                _check_chain(r, block, data, found, j, above)
            above = found


def _check_chain(
    r: Request, block: int, data: bytes, entry: CacheEntry, j: int, above: object
) -> None:
    """The entry's whole prefix is the request's, whose packed tokens are `data`; `above` is the
    entry before it, checked."""
    size = len(entry.data)
    while True:
        same = entry.data == data[j * size : (j + 1) * size]
        hold("I5", same, "{}: block {} holds other tokens", r, block)
        if entry.parent is above:
            return
        if not isinstance(entry.parent, CacheEntry):
            break
        entry, j = entry.parent, j - 1
    hold("I5", j == 0, "{}: block {} belongs elsewhere in a prefix", r, block)
    hold("I10", entry.parent == r.tenant, "{}: block {} is of {}", r, block, entry.parent)


def _check_bounds(scheduler: Scheduler) -> None:
    roster = scheduler.roster
    hold("I12", roster.queue.entries <= 2 * len(roster.queue) + 65, "the queue grows")
    led = roster.following.leaders
    hold("I12", led <= roster.running_count, "prefixes are led by requests that do not run")


def hold(name: str, condition: bool, what: str, *values: object) -> None:
    """Raise `InvariantError` unless the condition is met. `what` is a format of `values`."""
    if not condition:
        raise InvariantError(f"{name}: {what.format(*values)}")
