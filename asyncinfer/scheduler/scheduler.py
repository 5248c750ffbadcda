"""`Scheduler`: which tokens of which sequences are computed in the next step.

Synchronous and deterministic: no thread and no tensor; time is an argument, and a clock only times
plugins. Everything but `check_fits` is called on one thread. Several steps may be in flight:
`schedule` counts tokens as computed at once and leaves drawn tokens pending; `update` commits steps
in the order they were scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.protocols.scheduling import SchedulingPolicy
from asyncinfer.scheduler.committer import Committer
from asyncinfer.scheduler.counters import Counters, SchedulerStats
from asyncinfer.scheduler.limits import check_fits
from asyncinfer.scheduler.planner import Planner
from asyncinfer.scheduler.queue import Ranking
from asyncinfer.scheduler.sequence import Sequence, SequenceState
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step
from asyncinfer.scheduler.step_runner import RunnerSpec, StepResult
from asyncinfer.speculation import Speculator

__all__ = ["Scheduler"]

NEW, WAITING, RUNNING, PAUSED, LEAVING, FINISHED = SequenceState


class Scheduler:
    """Continuous batching over a paged, prefix-cached KV cache.

    Args:
        spec: what the runner holds.
        policy: who goes first, who is preempted.
        cache: the prefix cache, made for `spec.block_size`; None computes every prompt.
        on_fault: told once when `policy` misbehaves and is replaced by first-come-first-served
            (a cache policy reports through the `PrefixCache`).
        clock: monotonic seconds, to time `policy`; None never finds it too slow.
        label: what messages call `policy`.
        on_preempt: told of every sequence that loses its blocks.
        speculator: makes drafts for sequences that have a drafter.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        policy: SchedulingPolicy,
        cache: PrefixCache | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        on_preempt: Callable[[Sequence], None] | None = None,
        clock: Callable[[], float] | None = None,
        label: str | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.spec = spec
        self.cache = cache
        self.counters = Counters()
        ranking = Ranking(policy, on_fault, clock, label)
        self.speculator = speculator or Speculator()
        self.states = SequenceStates(
            spec, cache, ranking, self.counters, on_preempt, self.speculator
        )
        self.planner = Planner(spec, self.states, self.counters)
        self._committer = Committer(spec.block_size, self.states, self.counters)
        #: The groups of pages by their kinds, for statistics.
        (_, self._first), *others = zip(spec.groups, self.states.slots.blocks.groups, strict=True)
        windows = [(kind, pages) for kind, pages in others if kind.window is not None]
        self._windows = [pages for kind, pages in windows if not kind.state]
        self._kept = [pages for kind, pages in windows if kind.state]
        #: Steps scheduled and not yet committed, the oldest first.
        self.in_flight: deque[Step] = deque()
        self._scheduled = 0
        #: When the last step was committed.
        self._updated = 0.0
        #: Sequences that were in a retracted step, and have drawn no token since.
        self._retracted: list[Sequence] = []

    def check_fits(
        self, prompt_len: int, max_tokens: int | None, prompt_logprobs: int | None = None
    ) -> int:
        """`max_total` of a sequence, or `InvalidRequest`: see `asyncinfer.scheduler.check_fits`.
        From any thread."""
        return check_fits(self.spec, prompt_len, max_tokens, prompt_logprobs)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Forks are added after the sequence they fork from."""
        assert sequence.state is NEW
        for each in (sequence, sequence.guide):
            if self.cache is not None and each is not None and not each.keys:
                each.keys = self.cache.keys(each.tokens, *each.namespace)
        self.states.wait(sequence)

    def finish(self, sequence: Sequence, now: float) -> None:
        """End a sequence for whatever reason (abort, stop string, error). Does nothing if it has
        ended. While a step that computes it is in flight it keeps slot and blocks; later results
        of such steps are dropped."""
        self._set_time(now)
        self.states.finish(sequence)
        self._forget_ended()

    def pause(self, sequence: Sequence) -> None:
        """Schedule a sequence no more until it is resumed (a token in flight is still committed).
        It keeps slot and blocks until another needs them. Does nothing if it is paused or has
        ended."""
        self.states.pause(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Schedule a paused sequence again; does nothing if it is not paused."""
        self.states.resume(sequence)

    def converse(self, what: str, argument: Any, now: float) -> None:
        """Note that a conversation changed. `argument` is the conversation if `what` is "waiting"
        (for a tool) or "over". If `what` is "fork", it is a pair: the second conversation begins as
        the first one is now."""
        if self.cache is None:
            return
        self._set_time(now)
        conversations = self.cache.conversations
        match what:
            case "waiting":
                conversations.wait(argument)
            case "over":
                conversations.end(argument)
            case "fork":
                one, made = argument
                conversations.fork(one, made, now)

    def schedule(self, now: float) -> Step | None:
        """The next step, None when nothing can be computed before an `update`, `resume` or `add`.
        It must be launched, and its result handed to `update`."""
        self._set_time(now)
        step = self.planner.plan(self._scheduled) if self.states else None
        if step is not None:
            self.in_flight.append(step)
            self._scheduled += 1
        return step

    def retract(self, step: Step, now: float) -> list[Sequence]:
        """Take back the step scheduled last, which the device has no room for. The next ones will
        be half as large at most, see `StepBudget`. The prompts that were in it are computed again,
        from what is in the prefix cache. Returns the sequences that end here: prompts, and a step's
        only token, for which that happens a second time."""
        self._set_time(now)
        last = self.in_flight.pop()
        assert last is step, "only the step scheduled last can be retracted"
        tokens = step.tokens
        # A pair cannot be parted.
        least = 2 if step.guided else 1
        self.planner.budget.shrink(tokens)
        step.take_back()
        lost: list[Sequence] = []
        for row, sequence in enumerate(step.sequences):
            decodes = row < step.answers
            if not decodes or tokens <= least:
                if sequence in self._retracted:
                    lost.append(sequence)
                    self.states.finish(sequence)
                    continue
                self._retracted.append(sequence)
            if not decodes:
                self.states.preempt(sequence)
        for forced in step.forced:
            # The runner may have had no room for these tokens: the sequence is preempted, and the
            # runner is told all of its tokens when it joins again.
            held = self.sequence_at(forced.slot)
            if held is not None and held.state in (RUNNING, PAUSED):
                self.states.preempt(held)
        self.states.slots.release_sources(step)
        return lost

    def update(self, step: Step, result: StepResult, now: float) -> None:
        """Commit the oldest step in flight: append its tokens, publish full blocks, end sequences
        that are done, free what ended or was preempted. `step` then says what came out."""
        self._set_time(now)
        oldest = self.in_flight.popleft()
        assert oldest is step, "steps are committed in the order they were scheduled"
        self.planner.budget.computed(retried=self._retracted != [] and self._retried(step))
        seconds = now - max(step.began, self._updated)
        if not step.only_answers:
            self.planner.pace.computed(step, seconds)
        else:
            self.speculator.costs.add(step.tokens, seconds, bool(step.drafts))
        self._updated = now
        self._committer.commit(step, result)
        self.states.slots.release_sources(step)
        self._forget_ended()

    def _retried(self, step: Step) -> bool:
        """Whether a retracted sequence is in the step. One that draws a token has had its room."""
        rows = {sequence.id: row for row, sequence in enumerate(step.sequences)}
        draws = step.samples
        self._retracted = [
            sequence
            for sequence in self._retracted
            if sequence.state is not FINISHED
            and not (sequence.id in rows and draws[rows[sequence.id]])
        ]
        return any(sequence.id in rows for sequence in self._retracted)

    def _forget_ended(self) -> None:
        """Drop retracted sequences that have ended. No later step may come to do so, and an idle
        engine must hold no prompt."""
        if self._retracted:
            self._retracted = [r for r in self._retracted if r.state is not FINISHED]

    def _set_time(self, now: float) -> None:
        self.states.now = now
        if (cache := self.cache) is not None:
            cache.now = now
            if now >= cache.conversations.due:
                cache.conversations.expire(now)

    def sequence_at(self, slot: int) -> Sequence | None:
        """The sequence that owns a slot, None if it is free."""
        return self.states.slots.sequences[slot]

    @property
    def only_decodes(self) -> bool:
        """Whether no prompt waits or is computed, and nothing is drafted."""
        states = self.states
        return not (
            states.queue.size or states.prefilling or states.stepwise or states.prefixes.followers
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is runnable or in flight (paused sequences are not work)."""
        return bool(self.in_flight or self.states)

    def stats(self) -> SchedulerStats:
        """The counters as they are now."""
        states, counters, cache = self.states, self.counters, self.cache
        cached = pinned = 0
        if cache is not None:
            # `PrefixCache.evictable`, inlined, since most steps need it twice.
            cached = len(cache.guard.evictable) + len(cache.conversations.idle)
            pinned = cache.conversations.pinned_blocks
        return SchedulerStats(
            running=states.running_count,
            waiting=states.queue.size
            + len(states.prefixes.followers)
            + states.leaving_for(WAITING),
            paused=len(states.paused) + states.leaving_for(PAUSED),
            blocks_total=self._first.pool.size,
            blocks_free=len(self._first.pool.free),
            blocks_cached=cached,
            blocks_pinned=pinned,
            window_pages_total=sum([group.pool.size for group in self._windows]),
            window_pages_free=sum([len(group.pool.free) for group in self._windows]),
            window_pages_cached=sum([group.cached for group in self._windows]),
            state_pages_total=sum([group.pool.size for group in self._kept]),
            state_pages_free=sum([len(group.pool.free) for group in self._kept]),
            state_pages_cached=sum([group.cached for group in self._kept]),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
        )
