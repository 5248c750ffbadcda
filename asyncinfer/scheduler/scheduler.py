"""`Scheduler`: which tokens of which sequences are computed in the next step.

Synchronous and deterministic: no clock (time is an argument), no thread, no tensor. Everything
is called on one thread. Several steps may be in flight: `schedule` counts tokens as computed at
once and leaves drawn tokens pending; `update` commits steps in the order they were scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

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
        clock: monotonic seconds, by which `policy` is too slow; never, without one.
        label: what messages call `policy`.
        on_preempt: told of every sequence that loses its blocks.
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
    ) -> None:
        self.spec = spec
        self.cache = cache
        self.counters = Counters()
        ranking = Ranking(policy, on_fault, clock, label)
        self.states = SequenceStates(spec, cache, ranking, self.counters, on_preempt)
        self.planner = Planner(spec, self.states, self.counters)
        self._committer = Committer(spec.block_size, self.states, self.counters)
        #: Steps scheduled and not yet committed, the oldest first.
        self.in_flight: deque[Step] = deque()
        self._scheduled = 0
        #: Sequences that were too much for the device once, and have drawn no token since.
        self._retracted: list[Sequence] = []

    def check_fits(
        self, prompt_len: int, max_tokens: int | None, prompt_logprobs: int | None = None
    ) -> int:
        """`max_total` of a sequence, or `InvalidRequest`: see `asyncinfer.scheduler.check_fits`.
        From any thread."""
        return check_fits(self.spec, prompt_len, max_tokens, prompt_logprobs)

    def add(self, sequence: Sequence) -> None:
        """A new sequence; it waits. Forks are added after the sequence they fork from."""
        assert sequence.state is NEW
        if self.cache is not None and not sequence.keys:
            sequence.keys = self.cache.keys(sequence.tokens, *sequence.tenant)
        self.states.wait(sequence)

    def finish(self, sequence: Sequence, now: float) -> None:
        """End a sequence for whatever reason (abort, stop string, error). Does nothing if it has
        ended. While a step that computes it is in flight it keeps slot and blocks; later results
        of such steps are dropped."""
        self._set_time(now)
        self.states.finish(sequence)
        self._forget_ended()

    def pause(self, sequence: Sequence) -> None:
        """Schedule it no more until resumed (a token in flight is still committed). It keeps slot
        and blocks until somebody needs them. Does nothing if it is paused or has ended."""
        self.states.pause(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a paused sequence; does nothing if it is not paused."""
        self.states.resume(sequence)

    def schedule(self, now: float) -> Step | None:
        """The next step, None when nothing can be computed before an `update`, `resume` or `add`.
        It must be launched, and its result handed to `update`."""
        self._set_time(now)
        step = self.planner.plan(self._scheduled)
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
        self.planner.budget.shrink(tokens)
        step.take_back()
        lost: list[Sequence] = []
        for row, sequence in enumerate(step.sequences):
            decodes = row < step.decodes
            if not decodes or tokens == 1:
                if sequence in self._retracted:
                    lost.append(sequence)
                    self.states.finish(sequence)
                    continue
                self._retracted.append(sequence)
            if not decodes:
                self.states.preempt(sequence)
        self.states.slots.unpin(step)
        return lost

    def update(self, step: Step, result: StepResult, now: float) -> None:
        """Commit the oldest step in flight: append its tokens, publish full blocks, end sequences
        that are done, free what ended or was preempted. `step` then says what came out."""
        self._set_time(now)
        oldest = self.in_flight.popleft()
        assert oldest is step, "steps are committed in the order they were scheduled"
        self.planner.budget.computed(retried=self._retracted != [] and self._retried(step))
        self._committer.commit(step, result)
        self.states.slots.unpin(step)
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
        """There may be no later step that would: an idle engine holds no prompt."""
        if self._retracted:
            self._retracted = [r for r in self._retracted if r.state is not FINISHED]

    def _set_time(self, now: float) -> None:
        self.states.now = now
        if self.cache is not None:
            self.cache.now = now

    def tenant(self, slot: int) -> Sequence | None:
        """Who owns a slot (for `Step.joins`: who was just admitted)."""
        return self.states.slots.tenants[slot]

    @property
    def has_work(self) -> bool:
        """Whether anything is runnable or in flight (paused sequences are not work)."""
        return bool(self.in_flight or self.states)

    def stats(self) -> SchedulerStats:
        """The counters as they are now."""
        states, counters = self.states, self.counters
        first, *others = states.slots.blocks.groups
        return SchedulerStats(
            running=states.running_count,
            waiting=len(states.queue)
            + len(states.prefixes.followers)
            + states.leaving_for(WAITING),
            paused=len(states.paused) + states.leaving_for(PAUSED),
            blocks_total=first.pool.size,
            blocks_free=len(first.pool.free),
            blocks_cached=first.cached,
            window_pages_total=sum([group.pool.size for group in others]),
            window_pages_free=sum([len(group.pool.free) for group in others]),
            window_pages_cached=sum([group.cached for group in others]),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
        )
