"""`SequenceStates`: where every live sequence is, and the ways from one place to another."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from asyncinfer.cache.page_group import PageGroup
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.inflight_prefixes import InflightPrefixes
from asyncinfer.scheduler.queue import Ranking, WaitingQueue
from asyncinfer.scheduler.sequence import Sequence, SequenceState
from asyncinfer.scheduler.slot_allocator import SlotAllocator
from asyncinfer.scheduler.step_runner import RunnerSpec

__all__ = ["SequenceStates"]

_NEW, WAITING, RUNNING, PAUSED, LEAVING, FINISHED = SequenceState


class SequenceStates:
    """Live sequences, each in exactly one collection, and the slots of those on the runner.

    WAITING   queue, or prefixes     owns nothing
    RUNNING   prefilling or decoding owns a slot and pages
    PAUSED    paused                 owns them until somebody needs them
    LEAVING   leaving                preempted; a step in flight still uses what it owns
    FINISHED  leaving, or nowhere    as LEAVING, or owns nothing
    """

    def __init__(
        self,
        spec: RunnerSpec,
        cache: PrefixCache | None,
        ranking: Ranking,
        counters: Counters,
        on_preempt: Callable[[Sequence], None] | None = None,
    ) -> None:
        self._counters = counters
        self._on_preempt = on_preempt
        self.slots = SlotAllocator(spec, cache)
        self.ranking = ranking
        # The dicts are by id: `decoding` in order of the last turn, the others in order of entry.
        self.queue = WaitingQueue(ranking)
        self.prefixes = InflightPrefixes(spec.block_size)
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.paused: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        #: Monotonic seconds, as last told.
        self.now = 0.0

    def __bool__(self) -> bool:
        """Whether anything is runnable."""
        return bool(
            self.decoding
            or self.prefilling
            or self.queue
            or self.prefixes.followers
            or self.leaving
        )

    def running(self) -> Iterator[Sequence]:
        return chain(self.decoding.values(), self.prefilling.values())

    @property
    def running_count(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def sleeping(self) -> Iterator[Sequence]:
        """Paused sequences that hold a slot."""
        return (sequence for sequence in self.paused.values() if sequence.slot >= 0)

    @property
    def sleeping_count(self) -> int:
        seated = len(self.slots.tenants) - len(self.slots.free)
        return seated - self.running_count - len(self.leaving)

    def ranked(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Best rank first."""
        return sorted(sequences, key=lambda sequence: self.ranking.rank(sequence, self.now))

    def leaving_for(self, state: SequenceState) -> int:
        """How many sequences are on their way off the batch to WAITING or PAUSED."""
        return sum(r.state is LEAVING and r.after is state for r in self.leaving.values())

    def incoming(self) -> list[int]:
        """Pages of each KV group that come free when the steps in flight are committed: of those
        who leave, and behind those who go on."""
        moving = [sequence for sequence in self.running() if sequence.in_flight]
        return [
            self._incoming(index, group, moving if index else [])
            for index, group in enumerate(self.slots.blocks.groups)
        ]

    def _incoming(self, index: int, group: PageGroup, moving: abc.Sequence[Sequence]) -> int:
        refs = group.pool.refs
        gone = (page for r in self.leaving.values() for page in r.tables[index].live)
        behind = (
            page
            for r in moving
            for page in r.tables[index].pages[
                r.tables[index].first_live_page : group.first(r.computed)
            ]
        )
        return sum(refs[page] == 1 for page in chain(gone, behind))

    def expected(self) -> int:
        """Blocks that can be allocated, with a page in every KV group, once the steps in flight are
        committed."""
        groups = self.slots.blocks.groups
        pages = zip(groups, self.incoming(), strict=True)
        return min(group.available + incoming for group, incoming in pages)

    def trim(self) -> None:
        """Give back every page that nobody needs any more; most are given back when a block is
        full."""
        for sequence in chain(self.running(), self.sleeping()):
            self.slots.blocks.trim(sequence, sequence.committed)

    # -- what others ask for -------------------------------------------------------------------

    def wait(self, sequence: Sequence) -> None:
        """A sequence that is in no collection enters the queue."""
        sequence.state = WAITING
        self.queue.push(sequence, self.now)

    def run(self, sequence: Sequence) -> None:
        """A sequence that holds a slot and is in no collection joins the batch."""
        sequence.state = RUNNING
        # The step that draws the first token of an answer counts as prefill, even of one token.
        decodes = (
            sequence.total_known - sequence.computed == 1
            and sequence.total_known > sequence.prompt_len
        )
        (self.decoding if decodes else self.prefilling)[sequence.id] = sequence
        self.prefixes.lead(sequence)

    def decode(self, sequence: Sequence) -> None:
        """All known tokens of the sequence are computed or in flight: from now on it decodes."""
        if self.prefilling.pop(sequence.id, None) is not None:
            self.decoding[sequence.id] = sequence

    def rotate(self, count: int) -> None:
        """Move the first `count` decoding sequences, which had their turn, behind the others."""
        for id in list(islice(self.decoding, count)):
            self.decoding[id] = self.decoding.pop(id)

    def follow(self, sequence: Sequence, leader: Sequence, tokens: int) -> None:
        """A queued sequence waits until the leader has committed so many tokens."""
        self.queue.remove(sequence)
        self.prefixes.follow(sequence, leader, tokens)

    def advance(self, leader: Sequence) -> None:
        """The leader committed tokens: some of its followers have waited long enough."""
        self.prefixes.lead(leader)
        self._requeue(self.prefixes.advance(leader))

    def pause(self, sequence: Sequence) -> None:
        if sequence.state is LEAVING:
            sequence.after = PAUSED
            self._requeue(self.prefixes.dissolve(sequence))
        elif sequence.state in (WAITING, RUNNING):
            self._remove(sequence)
            self._park(sequence)

    def resume(self, sequence: Sequence) -> None:
        if sequence.state is LEAVING:
            sequence.after = WAITING
        elif sequence.state is PAUSED:
            self._remove(sequence)
            if sequence.slot < 0:
                self.wait(sequence)
            else:
                self.run(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence.state is FINISHED:
            return
        self._remove(sequence)
        sequence.state = FINISHED
        if sequence.in_flight:
            self.leaving[sequence.id] = sequence
        elif sequence.slot >= 0:
            self.slots.vacate(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a running or paused sequence, which is computed again later."""
        self._counters.preemptions += 1
        sequence.preemptions += 1
        if self._on_preempt is not None:
            self._on_preempt(sequence)
        sequence.after = PAUSED if sequence.state is PAUSED else WAITING
        self._remove(sequence)
        sequence.state = LEAVING
        self.leaving[sequence.id] = sequence
        if not sequence.in_flight:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """No step in flight uses a leaving sequence any more."""
        del self.leaving[sequence.id]
        self.slots.vacate(sequence)
        if sequence.state is LEAVING:
            if sequence.after is PAUSED:
                self._park(sequence)
            else:
                self.wait(sequence)

    # -- inside --------------------------------------------------------------------------------

    def _park(self, sequence: Sequence) -> None:
        sequence.state = PAUSED
        self.paused[sequence.id] = sequence

    def _remove(self, sequence: Sequence) -> None:
        """Take a live sequence out of where it is; those that follow it go back to the queue."""
        state = sequence.state
        if state is RUNNING:
            if self.decoding.pop(sequence.id, None) is None:
                del self.prefilling[sequence.id]
        elif state is PAUSED:
            del self.paused[sequence.id]
        elif state is LEAVING:
            del self.leaving[sequence.id]
        elif sequence.following is not None:
            self.prefixes.leave(sequence)
        else:
            self.queue.remove(sequence)
        self._requeue(self.prefixes.dissolve(sequence))

    def _requeue(self, followers: Iterable[Sequence]) -> None:
        for follower in followers:
            self.wait(follower)
