"""`Admitter`: which waiting sequences join a step."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from operator import add, le

from asyncinfer.cache.entry import CacheEntry
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.page_forecast import incoming_pages
from asyncinfer.scheduler.pairs import Pairs
from asyncinfer.scheduler.sequence import Sequence, SequenceState
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step

__all__ = ["Admitter"]


class Admitter:
    """Admits sequences to a step that has room left, with a slot and pages in every KV group."""

    def __init__(
        self,
        block_size: int,
        states: SequenceStates,
        counters: Counters,
        pairs: Pairs,
        *,
        whole_prompts: bool = False,
    ) -> None:
        """`whole_prompts`: see `RunnerSpec.whole_prompts`."""
        self._block_size = block_size
        self._whole_prompts = whole_prompts
        self._states = states
        self._counters = counters
        self._pairs = pairs
        self._slots = states.slots
        self.blocks = states.slots.blocks
        #: The sequence that did not fit: its id, the pages that each group had available, and how
        #: many sequences ran.
        self._stuck: tuple[int, list[int], int] = (-1, [], 0)

    def admit(self, step: Step, budget: int) -> None:
        """Admit waiting sequences, the best-ranked first, while budget, slots and pages last.

        A sequence that does not fit holds up those behind it, or it might wait for ever. A sequence
        whose prefix another one is computing steps aside.
        """
        states = self._states
        margins: list[int] = []
        while budget > 0 and (sequence := states.queue.peek(states.now)) is not None:
            guide = sequence.guide
            if guide is not None and not step.sequences:
                # A pair cannot be parted, however small steps have become.
                budget = max(2, budget)
            if self._whole_prompts and len(sequence.tokens) > budget:
                if step.sequences:
                    return
                # A whole prompt is computed in one step.
                budget = len(sequence.tokens)
            if self._hopeless(sequence) or (guide is not None and (guide.slot >= 0 or budget < 2)):
                # A step in flight may still use what the guide owns.
                return
            if sequence.fork_of is not None and (wait := self._fork_wait(sequence)) is not None:
                states.follow(sequence, *wait)
                continue
            entries: list[CacheEntry] = []
            if sequence.fork_of is None:
                reusable = self._reusable(sequence)
                entries = self.blocks.match(sequence, reusable)
                ahead = states.prefixes.ahead(sequence, len(entries), reusable)
                if ahead is not None:
                    self._counters.shared += 1
                    states.follow(sequence, *ahead)
                    continue
            margins = margins or self._margins(states.running())
            if not self._fit(sequence, entries, margins):
                stuck, most, _ = self._stuck
                pages = self._available()
                if sequence.id == stuck:
                    # Pages of the other groups come and go while sequences run: remember the most
                    # that was available and did not suffice.
                    pages[1:] = map(max, pages[1:], most[1:])
                self._stuck = (sequence.id, pages, states.running_count)
                return
            if sequence.fork_of is not None and sequence.fork_of.slot < 0:
                # `_fit` preempted the sibling to make room: it was paused.
                continue
            budget -= self._admit_one(step, sequence, entries, budget)
            pair = (sequence,) if guide is None else (sequence, guide)
            margins = list(map(add, margins, self._margins(pair)))

    def _hopeless(self, sequence: Sequence) -> bool:
        """Whether no more is available than when the sequence did not fit. The check saves looking
        up a long prompt's blocks in every step."""
        states = self._states
        if not self._slots.free and not states.sleeping_count:
            return True
        running = states.running_count
        if not running and not states.leaving:
            return False
        stuck, pages, ran = self._stuck
        return sequence.id == stuck and running >= ran and all(map(le, self._available(), pages))

    def _available(self) -> list[int]:
        """Pages of each group that can be taken."""
        return [group.available for group in self.blocks.groups]

    def _margins(self, sequences: Iterable[Sequence]) -> list[int]:
        """Pages of each group to leave to running sequences: what their prompts still need and one
        more, so that they do not preempt a newcomer at once. A sequence never needs more at once
        than `PageGroup.steady`."""
        needs = [(1 + self.blocks.missing(r, r.total_known), r.tables) for r in sequences]
        return [
            sum(min(need, max(1, group.steady - tables[g].held)) for need, tables in needs)
            for g, group in enumerate(self.blocks.groups)
        ]

    def _fork_wait(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """The sibling that an answer of `n` has to wait for, and for how many tokens. None where it
        can be admitted now; if `fork_of` is None then, it shares nothing."""
        leader, shared = sequence.fork_of, len(sequence.tokens) - 1
        assert leader is not None
        # A sibling that failed may have written NaN to its pages.
        alive = leader.slot >= 0 and leader.state is not SequenceState.FINISHED
        if alive and leader.committed >= shared:
            if not self.blocks.can_fork(leader, shared):
                # The pages that the sibling gave back may still be in the prefix cache.
                sequence.fork_of = None
            return None
        state = leader.after if leader.state is SequenceState.LEAVING else leader.state
        if state in (SequenceState.WAITING, SequenceState.RUNNING):
            return leader, shared
        # The sibling ended or is paused: what it computed may be in the prefix cache.
        sequence.fork_of = None
        return None

    def _reusable(self, sequence: Sequence) -> int:
        """Leading tokens that may come from the cache. Tokens whose logprobs are still to be given
        are computed, and so is the last token, which draws the next one."""
        limit = len(sequence.tokens) - 1
        if sequence.pooling == "mean":
            # Cached tokens have keys and values, but no hidden states.
            return 0
        if sequence.prompt_logprobs is not None and sequence.scored < sequence.prompt_len - 1:
            limit = min(limit, sequence.scored)
        return limit

    def _fit(
        self, sequence: Sequence, entries: abc.Sequence[CacheEntry], margins: abc.Sequence[int]
    ) -> bool:
        """Whether there is a slot, and in every group pages for everything known of the sequence
        beside the margin, and as much for its guide; preempts paused sequences if that is what it
        takes."""
        states = self._states
        shared = 0 if sequence.fork_of is None else len(sequence.tokens) - 1
        guide, slots = sequence.guide, 1 if sequence.guide is None else 2
        while True:
            wanted = self.blocks.wanted(len(sequence.tokens), entries, shared)
            if guide is not None:
                # As if nothing of it were cached.
                wanted = list(map(add, wanted, self.blocks.wanted(len(guide.tokens), (), 0)))
            lacking = [
                want + margin - free
                for want, margin, free in zip(wanted, margins, self._available(), strict=True)
            ]
            if max(lacking) <= 0 and len(self._slots.free) >= slots:
                return True
            if not states.sleeping_count:
                return False
            coming = all(map(le, lacking, incoming_pages(states)))
            if coming and (len(self._slots.free) >= slots or states.leaving):
                return False
            states.preempt(states.ranked(states.sleeping())[-1])

    def _admit_one(
        self, step: Step, sequence: Sequence, entries: abc.Sequence[CacheEntry], budget: int
    ) -> int:
        """Admit the sequence with its first chunk; returns how many tokens that is."""
        states = self._states
        states.queue.remove(sequence)
        if sequence.fork_of is not None:
            self._slots.allocate_fork(sequence, sequence.fork_of)
            sequence.fork_of = None
            self._counters.forks += 1
        else:
            self._slots.allocate(sequence, entries)
            if not (sequence.preemptions or sequence.index):
                sequence.cached_tokens = sequence.computed
                self._counters.prompt_tokens += sequence.prompt_len
                self._counters.cached_tokens += sequence.computed
        if sequence.guide is not None:
            return self._admit_pair(step, sequence, sequence.guide, budget)
        spare = self.blocks.available * self._block_size
        chunk = min(sequence.chunk(budget), sequence.capacity + spare - sequence.computed)
        self.blocks.grow(sequence, self.blocks.missing(sequence, sequence.computed + chunk))
        step.joins.append(self._slots.join(sequence))
        states.run(sequence)
        if step.add_chunk(sequence, chunk):
            states.decode(sequence)
        return chunk

    def _admit_pair(self, step: Step, sequence: Sequence, guide: Sequence, budget: int) -> int:
        """Admit the guide of a sequence that has its slot, with the first chunks of both; returns
        how many tokens those are."""
        self._slots.allocate(guide, self.blocks.match(guide, len(guide.tokens) - 1))
        counts = self._pairs.chunks(sequence, guide, budget)
        for each, count in zip((sequence, guide), counts, strict=True):
            self.blocks.grow(each, self.blocks.missing(each, each.computed + count))
            step.joins.append(self._slots.join(each))
            self._states.run(each)
        self._pairs.add_rows(step, sequence, counts)
        return sum(counts)
