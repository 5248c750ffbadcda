"""What always holds between two calls of a `Scheduler`: I1 to I14, with which messages begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter

from asyncinfer.cache import BlockTable, PageGroup, WindowPages
from asyncinfer.cache.chain import TOKEN_BYTES, pack
from asyncinfer.cache.entry import CacheEntry
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.scheduler.scheduler import Scheduler
from asyncinfer.scheduler.sequence import Sequence, SequenceState

__all__ = ["InvariantError", "check_drained", "check_invariants", "hold"]


class InvariantError(AssertionError):
    """An invariant of the scheduler or the cache does not hold; the message begins with its
    number."""


def check_invariants(scheduler: Scheduler, sequences: Iterable[Sequence]) -> None:
    """Check everything. `sequences` are all that were added and not yet forgotten, ended ones
    included. Cost: linear in blocks and tables.

    Raises:
        InvariantError: something does not hold.
    """
    sequences = list(sequences)
    seated = [sequence for sequence in sequences if sequence.slot >= 0]
    _check_places(scheduler, sequences)
    _check_slots(scheduler, seated)
    _check_references(scheduler, seated)
    _check_tables(scheduler, seated)
    _check_flights(scheduler)
    if scheduler.cache is not None:
        _check_cache(scheduler, seated)
    _check_bounds(scheduler)


def check_drained(scheduler: Scheduler) -> None:
    """Check that nothing is left: no sequence anywhere, no page in use."""
    hold("drain", not scheduler.has_work and not scheduler.stats().paused, "work is left")
    for number, group in enumerate(scheduler.states.slots.blocks.groups):
        hold("drain", not any(group.pool.refs), "pages of group {} are in use", number)
        hold("drain", group.available == group.pool.size, "pages of group {} are lost", number)


def _check_places(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    states, state = scheduler.states, SequenceState
    seen: set[int] = set()
    for name, members, allowed in (
        ("queue", [*states.queue], (state.WAITING,)),
        ("following", [*states.prefixes.followers.values()], (state.WAITING,)),
        ("prefilling", [*states.prefilling.values()], (state.RUNNING,)),
        ("stepwise", [*states.stepwise.values()], (state.RUNNING,)),
        ("decoding", [*states.decoding.values()], (state.RUNNING,)),
        ("paused", [*states.paused.values()], (state.PAUSED,)),
        ("leaving", [*states.leaving.values()], (state.LEAVING, state.FINISHED)),
    ):
        for r in members:
            hold("I8", r.id not in seen, "{} is in {} and elsewhere", r, name)
            hold("I8", r.state in allowed, "{} is in {}", r, name)
            seen.add(r.id)
    for r in sequences:
        rests = r.id in states.resting
        hold("I8", r.resting == rests or r.state is state.FINISHED, "{} rests unknown", r)
    hold("I8", states.queue.size == len([*states.queue]), "the queue miscounts")
    for r in sequences:
        if r.state is not state.FINISHED:
            hold("I8", r.id in seen, "{} is lost", r)
        if r.state is state.WAITING or (r.state is state.FINISHED and r.id not in seen):
            hold("I6", r.slot < 0 and not r.tables, "{} owns slot {}, {}", r, r.slot, r.tables)
    hold("I8", len(seen) <= len(sequences), "a sequence is nobody's")
    for r in states.leaving.values():
        hold("I6", r.in_flight > 0, "{} is leaving, but nothing holds it", r)
    for r in states.prefixes.followers.values():
        leader = r.following
        alive = (state.WAITING, state.RUNNING, state.LEAVING)
        hold("I9", leader is not None and leader.state in alive, "{} follows {}", r, leader)


def _check_slots(scheduler: Scheduler, seated: list[Sequence]) -> None:
    slots = scheduler.states.slots
    for sequence in seated:
        hold("I8", slots.sequences[sequence.slot] is sequence, "{} is not in its slot", sequence)
    taken = sum(held is not None for held in slots.sequences)
    hold("I8", taken == len(seated), "a slot has a sequence that does not know it")
    free = {slot for slot, held in enumerate(slots.sequences) if held is None}
    hold("I8", sorted(slots.free) == sorted(free), "free slots are not those without a sequence")


def _check_references(scheduler: Scheduler, seated: list[Sequence]) -> None:
    """Check I1 and I2 of every KV group."""
    for number, group in enumerate(scheduler.states.slots.blocks.groups):
        uses = Counter(page for r in seated for page in r.tables[number].live)
        for step in scheduler.in_flight:
            uses.update(source for g in step.groups[number : number + 1] for source, _ in g.copies)
        refs, name = group.pool.refs, f"group {number}"
        held = {page: count for page, count in enumerate(refs) if count}
        right = held == dict(uses)
        hold("I1", right, "{}: pages have references {}, and uses {}", name, held, uses)
        free, cached = set(group.pool.free), _cached(scheduler, group)
        hold("I2", len(free) == len(group.pool.free), "{}: a page is on the free list twice", name)
        hold("I2", group.cached == len(cached), "{}: a page is cached twice", name)
        unused = set(range(len(refs))).difference(held)
        hold("I2", not free & cached, "{}: a page is free and cached", name)
        hold("I2", free | cached == unused, "{}: unused pages are not those free or cached", name)


def _cached(scheduler: Scheduler, group: PageGroup) -> set[int]:
    """Pages without references that are kept for published blocks."""
    published = {} if scheduler.cache is None else scheduler.cache.by_block
    if not isinstance(group, WindowPages):
        cache = scheduler.cache
        return set() if cache is None else {*cache.guard.evictable, *cache.conversations.idle}
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
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            chunks[sequence.id] += count
    for r in seated:
        blocks = r.capacity // size
        hold("I4", r.capacity == blocks * size, "{}: capacity {}", r, r.capacity)
        # A guide has the drafts of its sequence, which forgets the guide when both end.
        drafter = r.drafter if r.guides is None else r.guides.drafter
        most = r.total_known + (0 if drafter is None else drafter.most)
        few = blocks <= -(-most // size)
        hold("I4", few or r.state is SequenceState.FINISHED, "{} has {} blocks", r, blocks)
        hold(
            "I4",
            r.committed <= r.computed <= min(r.total_known, r.capacity),
            "{}: {}",
            r,
            r.computed,
        )
        hold("I4", r.in_flight == chunks[r.id], "{} lost a chunk", r)
        if r.state is not SequenceState.FINISHED:
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
    for step in scheduler.in_flight:
        for row, sequence in enumerate(step.sequences):
            hold("I11", sequence.slot == step.slots[row], "{} lost its slot in flight", sequence)
            start, end = step.starts[row], step.starts[row] + step.counts[row]
            hold("I11", sequence.capacity >= end, "{} lost blocks in flight", sequence)
            for group, table in zip(groups, sequence.tables, strict=True):
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
    wrong = [
        entry.block
        for key, entry in cache.by_key.items()
        if entry.key != key
        or by_block.get(entry.block) is not entry
        or len(entry.data) != size * TOKEN_BYTES
        or entry.children != children.get(id(entry), 0)
    ]
    hold("I5", not wrong, "blocks {}: their key, tokens or children are wrong", wrong)
    check_conversations(cache)
    for r in seated:
        above: object = None
        data = pack(r.tokens)
        for j, block in enumerate(r.tables[0].pages):
            found = by_block.get(block)
            if found is not None:
                hold("I5", (j + 1) * size <= r.committed, "{}: block {} is not written", r, block)
                _check_chain(r, block, data, found, j, above)
            above = found


def check_conversations(cache: PrefixCache) -> None:
    """I14: every pin is that of an open conversation, and pins are as many as may be at most."""
    talks, entries = cache.conversations, [*cache.by_block.values()]
    pinning = [each for state in talks.pinning.values() for each in state]
    pins = Counter(id(entry) for each in pinning for entry in each.entries[: each.pinned])
    pinned = {entry.block for entry in entries if entry.pins}
    wrong = _miscounted(entries, "pins", pins)
    hold("I14", not wrong, "blocks {}: pins are not those of conversations", wrong)
    hold("I14", len(pins) == len(pinned), "a block that is gone is pinned")
    hold("I14", len(pinned) == talks.pinned_blocks <= talks.most, "{} are pinned", pinned)
    hold("I14", talks.idle.keys() <= pinned, "a block without pins is kept as if it had some")
    both = talks.idle.keys() & cache.guard.evictable.keys()
    hold("I14", not both, "blocks {} are pinned, and offered to the policy", both)
    for state, conversations in talks.pinning.items():
        for each in conversations:
            right = each.state == state and not each.ended and each in talks.open
            hold("I14", right and each.until >= talks.due, "one that is {} pins", each.state)
    for name in ("live", "waiting"):
        counts = Counter(id(e) for each in talks.open if each.state == name for e in each.entries)
        wrong = _miscounted(entries, name, counts)
        hold("I14", not wrong, "blocks {}: the conversations that are {} are others", wrong, name)
    told = {entry.block: entry.meta.conversation for entry in entries if entry.meta.conversations}
    states = {
        entry.block: "waiting" if entry.waiting else "live" if entry.live else "over"
        for entry in entries
        if entry.block in told
    }
    hold("I14", told == states, "told of {}, of which conversations are {}", told, states)
    wrong = [e.block for e in entries if e.meta.conversation is not None and e.block not in told]
    hold("I14", not wrong, "blocks {}: told of conversations that there are not", wrong)


def _miscounted(entries: list[CacheEntry], name: str, counts: Counter[int]) -> list[int]:
    """Blocks of the entries whose number of this name is not their ids' count."""
    # Nearly always the lists are equal, and compared without a call for each entry.
    found = [*map(attrgetter(name), entries)]
    right = [*map(counts.get, map(id, entries), repeat(0))]
    if found == right:
        return []
    return [e.block for e, has, most in zip(entries, found, right, strict=True) if has != most]


def _check_chain(
    r: Sequence, block: int, data: bytes, entry: CacheEntry, j: int, above: object
) -> None:
    """The entry's whole prefix is the sequence's, whose packed tokens are `data`; `above` is the
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
    hold("I10", entry.parent == r.namespace, "{}: block {} is of {}", r, block, entry.parent)


def _check_bounds(scheduler: Scheduler) -> None:
    states = scheduler.states
    hold("I12", states.queue.entries <= 2 * states.queue.size + 65, "the queue grows")
    led = states.prefixes.leaders
    hold("I12", led <= states.running_count, "prefixes are led by requests that do not run")


def hold(name: str, condition: bool, what: str, *values: object) -> None:
    """Raise `InvariantError` unless the condition is met. `what` is a format of `values`."""
    if not condition:
        raise InvariantError(f"{name}: {what.format(*values)}")
