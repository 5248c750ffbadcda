"""What always holds between two calls of a `Scheduler`, as I1 to I12: messages begin with these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncinfer.cache import BlockTable, PageGroup, WindowPages
from asyncinfer.cache.chain import TOKEN_BYTES, pack
from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler.scheduler import Scheduler
from asyncinfer.scheduler.sequence import Sequence, SequenceState

__all__ = ["InvariantError", "check_drained", "check_invariants", "hold"]


class InvariantError(AssertionError):
    """An invariant of the scheduler or the cache does not hold; the message begins with its
    number."""


def check_invariants(scheduler: Scheduler, requests: Iterable[Sequence]) -> None:
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
    if scheduler.cache is not None:
        _check_cache(scheduler, seated)
    _check_bounds(scheduler)


def check_drained(scheduler: Scheduler) -> None:
    """Nothing is left: no request anywhere, no page in use."""
    hold("drain", not scheduler.has_work and not scheduler.stats().paused, "work is left")
    for number, group in enumerate(scheduler.states.slots.blocks.groups):
        hold("drain", not any(group.pool.refs), "pages of group {} are in use", number)
        hold("drain", group.available == group.pool.size, "pages of group {} are lost", number)


def _check_places(scheduler: Scheduler, requests: list[Sequence]) -> None:
    states, state = scheduler.states, SequenceState
    seen: set[int] = set()
    for name, members, allowed in (
        ("queue", [*states.queue], (state.WAITING,)),
        ("following", [*states.prefixes.followers.values()], (state.WAITING,)),
        ("prefilling", [*states.prefilling.values()], (state.RUNNING,)),
        ("decoding", [*states.decoding.values()], (state.RUNNING,)),
        ("paused", [*states.paused.values()], (state.PAUSED,)),
        ("leaving", [*states.leaving.values()], (state.LEAVING, state.FINISHED)),
    ):
        for r in members:
            hold("I8", r.id not in seen, "{} is in {} and elsewhere", r, name)
            hold("I8", r.state in allowed, "{} is in {}", r, name)
            seen.add(r.id)
    hold("I8", len(states.queue) == len([*states.queue]), "the queue miscounts")
    for r in requests:
        if r.state is not state.FINISHED:
            hold("I8", r.id in seen, "{} is lost", r)
        if r.state is state.WAITING or (r.state is state.FINISHED and r.id not in seen):
            hold("I6", r.slot < 0 and not r.tables, "{} owns slot {}, {}", r, r.slot, r.tables)
    hold("I8", len(seen) <= len(requests), "a sequence is nobody's")
    for r in states.leaving.values():
        hold("I6", r.in_flight > 0, "{} is leaving, but nothing holds it", r)
    for r in states.prefixes.followers.values():
        leader = r.following
        alive = (state.WAITING, state.RUNNING, state.LEAVING)
        hold("I9", leader is not None and leader.state in alive, "{} follows {}", r, leader)


def _check_slots(scheduler: Scheduler, seated: list[Sequence]) -> None:
    slots = scheduler.states.slots
    for request in seated:
        hold("I8", slots.tenants[request.slot] is request, "{} is not in its slot", request)
    taken = sum(tenant is not None for tenant in slots.tenants)
    hold("I8", taken == len(seated), "a slot has a tenant that does not know it")
    free = {slot for slot, tenant in enumerate(slots.tenants) if tenant is None}
    hold("I8", sorted(slots.free) == sorted(free), "free slots are not those without a tenant")


def _check_references(scheduler: Scheduler, seated: list[Sequence]) -> None:
    """I1 and I2 of every KV group."""
    for number, group in enumerate(scheduler.states.slots.blocks.groups):
        uses = Counter(page for r in seated for page in r.tables[number].live)
        for step in scheduler.in_flight:
            uses.update(source for g in step.groups[number : number + 1] for source, _ in g.copies)
        refs, name = group.pool.refs, f"group {number}"
        wrong = [page for page, count in enumerate(refs) if count != uses[page]]
        hold("I1", not wrong, "{}, pages {}: references are not their uses", name, wrong)
        free, cached = set(group.pool.free), _cached(scheduler, group)
        hold("I2", len(free) == len(group.pool.free), "{}: a page is on the free list twice", name)
        hold("I2", group.cached == len(cached), "{}: a page is cached twice", name)
        unused = {page for page, count in enumerate(refs) if not count}
        hold("I2", not free & cached, "{}: a page is free and cached", name)
        hold("I2", free | cached == unused, "{}: unused pages are not those free or cached", name)


def _cached(scheduler: Scheduler, group: PageGroup) -> set[int]:
    """Pages without references that are kept for published blocks."""
    published = {} if scheduler.cache is None else scheduler.cache.by_block
    if not isinstance(group, WindowPages):
        return set() if scheduler.cache is None else set(scheduler.cache.guard.evictable)
    cached = group.unused.keys() | group.passed.keys()
    hold("I5", cached <= group.keeper.keys(), "an unused page is nobody's")
    pairs = {(page, block) for block, page in group.kept.items()}
    hold("I5", pairs == set(group.keeper.items()), "pages and their blocks differ")
    hold("I5", group.kept.keys() <= published.keys(), "a page is kept for a block that is gone")
    return cached


def _check_tables(scheduler: Scheduler, seated: list[Sequence]) -> None:
    size = scheduler.spec.block_size
    chunks = Counter[int]()
    for step in scheduler.in_flight:
        for request, count in zip(step.sequences, step.counts, strict=True):
            chunks[request.id] += count
    for r in seated:
        blocks = r.capacity // size
        hold("I4", r.capacity == blocks * size, "{}: capacity {}", r, r.capacity)
        hold("I4", blocks <= -(-r.total_known // size), "{} has {} blocks", r, blocks)
        hold(
            "I4",
            r.committed <= r.computed <= min(r.total_known, r.capacity),
            "{}: {}",
            r,
            r.computed,
        )
        if r.state is not SequenceState.FINISHED:
            hold("I4", r.computed - r.committed == chunks[r.id], "{} lost a chunk", r)
            hold("I4", r.draws_left >= 0, "{} draws too many tokens", r)
            hold("I4", len(r.tokens) <= r.total_known, "{} has tokens nobody drew", r)
        for group, table in zip(scheduler.states.slots.blocks.groups, r.tables, strict=True):
            _check_table(r, group, table, blocks, blocks - r.committed // size)


def _check_table(r: Sequence, group: PageGroup, table: BlockTable, blocks: int, new: int) -> None:
    """I3: a page for every block that tokens to come need, and for none before. `new`: blocks that
    are not full of committed tokens."""
    held = table.live
    hold("I3", len(table.pages) == blocks, "{}: {} of {} pages", r, len(table.pages), blocks)
    hold("I3", len(set(held)) == len(held), "{} has a page twice", r)
    hold("I3", all(page >= 0 for page in held), "{} lacks a page", r)
    passed = table.pages[: table.first_live_page]
    hold("I3", all(page < 0 for page in passed), "{} has a page it passed", r)
    hold("I3", table.first_live_page <= group.first(r.committed), "{} lost what it sees", r)
    # Given back block by block: the window, and the chunks in flight.
    hold("I3", len(held) <= group.steady - 2 + new, "{} has {} pages", r, len(held))


def _check_flights(scheduler: Scheduler) -> None:
    groups, size = scheduler.states.slots.blocks.groups, scheduler.spec.block_size
    in_flight = Counter(r.id for step in scheduler.in_flight for r in step.sequences)
    for step in scheduler.in_flight:
        for row, request in enumerate(step.sequences):
            hold("I11", request.slot == step.slots[row], "{} lost its slot in flight", request)
            known = request.in_flight == in_flight[request.id]
            hold("I11", known, "{} miscounts its steps", request)
            start, end = step.starts[row], step.starts[row] + step.counts[row]
            hold("I11", request.capacity >= end, "{} lost blocks in flight", request)
            for group, table in zip(groups, request.tables, strict=True):
                for page in table.pages[group.first(start) : -(-end // size)]:
                    used = page >= 0 and group.pool.refs[page] > 0
                    hold("I11", used, "page {} is free, but in flight", page)
        for group, changes in zip(groups, step.groups, strict=False):
            for source, target in changes.copies:
                used_twice = group.pool.refs[source] > 0 and group.pool.refs[target] > 0
                hold("I11", used_twice, "copy {} -> {} is free", source, target)


def _check_cache(scheduler: Scheduler, seated: list[Sequence]) -> None:
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
        for j, block in enumerate(r.tables[0].pages):
            found = by_block.get(block)
            if found is not None:
                hold("I5", (j + 1) * size <= r.committed, "{}: block {} is not written", r, block)
                _check_chain(r, block, data, found, j, above)
            above = found


def _check_chain(
    r: Sequence, block: int, data: bytes, entry: CacheEntry, j: int, above: object
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
    states = scheduler.states
    hold("I12", states.queue.entries <= 2 * len(states.queue) + 65, "the queue grows")
    led = states.prefixes.leaders
    hold("I12", led <= states.running_count, "prefixes are led by requests that do not run")


def hold(name: str, condition: bool, what: str, *values: object) -> None:
    """Raise `InvariantError` unless the condition is met. `what` is a format of `values`."""
    if not condition:
        raise InvariantError(f"{name}: {what.format(*values)}")
