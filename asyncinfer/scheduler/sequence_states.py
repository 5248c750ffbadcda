"""`SequenceStates`: where every live sequence is, and the ways from one place to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.inflight_prefixes import InflightPrefixes
from asyncinfer.scheduler.queue import Ranking, WaitingQueue
from asyncinfer.scheduler.sequence import Sequence, SequenceState
from asyncinfer.scheduler.slot_allocator import SlotAllocator
from asyncinfer.scheduler.step_runner import RunnerSpec
from asyncinfer.speculation import Speculator

__all__ = ["SequenceStates"]

_NEW, WAITING, RUNNING, PAUSED, LEAVING, FINISHED = SequenceState


class SequenceStates:
    """Live sequences, each in exactly one collection, and the slots of those on the runner.

    WAITING   queue, or prefixes     owns nothing
    RUNNING   prefilling, decoding   owns a slot and pages
              or stepwise
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
        speculator: Speculator | None = None,
    ) -> None:
        self._counters = counters
        self.speculator = speculator or Speculator()
        self._on_preempt = on_preempt
        self.slots = SlotAllocator(spec, cache)
        self.ranking = ranking
        # The dicts are by id: `decoding` in order of the last row, the others in order of entry.
        self.queue = WaitingQueue(ranking)
        self.prefixes = InflightPrefixes(spec.block_size)
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        #: Sequences that decode with one row in flight at a time: see `Sequence.stepwise`.
        self.stepwise: dict[int, Sequence] = {}
        #: Running sequences with a guide, the one with the oldest row first.
        self.paired: dict[int, Sequence] = {}
        self.paused: dict[int, Sequence] = {}
        #: Sequences with a resting drafter, wherever they are.
        self.resting: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        #: Monotonic seconds, which `Scheduler` sets.
        self.now = 0.0

    def __bool__(self) -> bool:
        """Whether anything is runnable."""
        return bool(
            self.decoding
            or self.stepwise
            or self.prefilling
            or self.queue.size
            or self.prefixes.followers
            or self.leaving
        )

    def running(self) -> Iterator[Sequence]:
        return chain(self.decoding.values(), self.stepwise.values(), self.prefilling.values())

    @property
    def running_count(self) -> int:
        return len(self.decoding) + len(self.stepwise) + len(self.prefilling)

    def sleeping(self) -> Iterator[Sequence]:
        """Paused sequences that hold a slot."""
        return (sequence for sequence in self.paused.values() if sequence.slot >= 0)

    @property
    def sleeping_count(self) -> int:
        taken = len(self.slots.sequences) - len(self.slots.free)
        return taken - self.running_count - len(self.leaving)

    def ranked(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Best rank first."""
        return sorted(sequences, key=lambda sequence: self.ranking.rank(sequence, self.now))

    def leaving_for(self, state: SequenceState) -> int:
        """How many sequences are on their way off the batch to WAITING or PAUSED."""
        return sum(r.state is LEAVING and r.after is state for r in self.leaving.values())

    def trim(self) -> None:
        """Give back every page that no later token needs. The committer does so only when a
        sequence has filled a block."""
        for sequence in chain(self.running(), self.sleeping()):
            self.slots.blocks.trim(sequence, sequence.committed)

    # -- what others ask for -------------------------------------------------------------------

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence that is in no collection into the queue. Its guide is in none as long as
        it waits."""
        if sequence.guide is not None:
            # Not before: a request that ends while it is prepared leaves no cycle of references.
            sequence.guide.guides = sequence
        sequence.state = WAITING
        self.queue.push(sequence, self.now)

    def run(self, sequence: Sequence) -> None:
        """Let a sequence that holds a slot and is in no collection join the batch."""
        sequence.state = RUNNING
        # The step that draws the first token of an answer counts as prefill, even of one token.
        decodes = (
            sequence.total_known - sequence.computed == 1
            and sequence.total_known > sequence.prompt_len
        )
        (self._decoding(sequence) if decodes else self.prefilling)[sequence.id] = sequence
        if sequence.guide is not None:
            self.paired[sequence.id] = sequence
        self.prefixes.lead(sequence)

    def decode(self, sequence: Sequence) -> None:
        """All known tokens of the sequence are computed or in flight: from now on it decodes."""
        if self.prefilling.pop(sequence.id, None) is not None:
            self._decoding(sequence)[sequence.id] = sequence

    def rotate(self, count: int) -> None:
        """Move the first `count` decoding sequences, which have a row now, behind the others."""
        for id in list(islice(self.decoding, count)):
            self.decoding[id] = self.decoding.pop(id)

    def rest(self, sequence: Sequence) -> None:
        """Nobody drafts for a stepwise sequence for a while: its rows need not wait for each
        other."""
        if self.stepwise.pop(sequence.id, None) is not None:
            sequence.resting = True
            self.resting[sequence.id] = sequence
            self._decoding(sequence)[sequence.id] = sequence

    def wake(self) -> None:
        """Sequences that have rested for long enough go step by step again."""
        for sequence in list(self.resting.values()):
            assert sequence.drafter is not None
            if sequence.total_known >= sequence.drafter.resting_until:
                del self.resting[sequence.id]
                decodes = self.decoding.pop(sequence.id, None) is not None
                sequence.resting = False
                if decodes:
                    self._decoding(sequence)[sequence.id] = sequence

    def _decoding(self, sequence: Sequence) -> dict[int, Sequence]:
        return self.stepwise if sequence.stepwise else self.decoding

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
            for each in self._seated(sequence):
                self._remove(each)
                self._set_paused(each)

    def resume(self, sequence: Sequence) -> None:
        if sequence.state is LEAVING:
            sequence.after = WAITING
        elif sequence.state is PAUSED:
            for each in self._seated(sequence):
                self._remove(each)
                if each.slot < 0:
                    self.wait(each)
                else:
                    self.run(each)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, and with it the one that it guides or is guided by."""
        if sequence.guides is not None:
            sequence = sequence.guides
        if sequence.state is FINISHED:
            return
        self._finish(sequence)
        if sequence.guide is not None:
            self._finish(sequence.guide)
            # The two refer to each other: the garbage collector alone would find them.
            sequence.guide.guides = None

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is not _NEW:
            self._remove(sequence)
        sequence.state = FINISHED
        if sequence.drafter is not None:
            self.resting.pop(sequence.id, None)
            self.speculator.end(sequence.drafter)
        if sequence.in_flight:
            self.leaving[sequence.id] = sequence
            if sequence.conversation is not None:
                sequence.conversation.leaving = True
        elif sequence.slot >= 0:
            self.slots.vacate(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a running or paused sequence, which is computed again later, and
        from its guide, or the one that it guides."""
        if sequence.guides is not None:
            sequence = sequence.guides
        if sequence.state not in (RUNNING, PAUSED):
            # The other of the two was preempted, and this one with it.
            return
        self._counters.preemptions += 1
        if self._on_preempt is not None:
            self._on_preempt(sequence)
        if sequence.guide is not None:
            self._leave(sequence.guide, _NEW)
        self._leave(sequence, PAUSED if sequence.state is PAUSED else WAITING)

    def _leave(self, sequence: Sequence, after: SequenceState) -> None:
        sequence.preemptions += 1
        sequence.after = after
        self._remove(sequence)
        if sequence.drafter is not None:
            self.speculator.suspend(sequence.drafter)
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
                self._set_paused(sequence)
            elif sequence.after is _NEW:
                sequence.state = _NEW
            else:
                self.wait(sequence)

    # -- inside --------------------------------------------------------------------------------

    def _seated(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, and its guide as long as it has a slot, too."""
        guide = sequence.guide
        return [sequence] if guide is None or sequence.slot < 0 else [sequence, guide]

    def _set_paused(self, sequence: Sequence) -> None:
        sequence.state = PAUSED
        self.paused[sequence.id] = sequence

    def _remove(self, sequence: Sequence) -> None:
        """Take a live sequence out of its collection; its followers go back to the queue."""
        state = sequence.state
        if state is RUNNING:
            self.paired.pop(sequence.id, None)
            if self._decoding(sequence).pop(sequence.id, None) is None:
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
