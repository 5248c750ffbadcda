"""`Simulation`: a scheduler over the fake model, step by step, with everything checked.

After every call the invariants are checked, every token is compared with the oracle's, every
page that becomes free is poisoned, and every page that is published is compared with what it
must hold.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncinfer.cache import Conversation
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import Proposer
from asyncinfer.protocols.scheduling import SchedulingPolicy
from asyncinfer.scheduler import RunnerSpec, Scheduler, Sequence, SequenceState, Step, StepResult
from asyncinfer.speculation import Drafter, GuardedProposer, Speculator
from asyncinfer.testing.invariants import InvariantError, check_drained, check_invariants, hold
from asyncinfer.testing.strict_runner import StrictRunner
from asyncinfer.testing.watched_pages import WatchedPages

__all__ = ["Simulation", "Track"]


@dataclass(slots=True)
class Track:
    """What one request asked for, and what it got."""

    sequence: Sequence
    #: The oracle's answer up to its end, and how it ends.
    expected: list[int]
    ends: str
    tokens: list[int] = field(default_factory=list)
    #: Prompt positions whose logprob came, in order.
    scored: list[int] = field(default_factory=list)
    #: "stop", "length", "aborted", "failed".
    ended: str | None = None


class Simulation:
    """Drives a `Scheduler` with `depth` steps in flight.

    `proposer` makes drafts for every sequence. Time is `now`, in seconds, and moves only when
    somebody moves it. `failing` makes rows fail and `no_room` steps, as `FakeSteps` has it.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        policy: SchedulingPolicy,
        cache: PrefixCache | None,
        depth: int = 1,
        eos_every: int | None = None,
        failing: Callable[[Step], Mapping[int, Exception]] | None = None,
        no_room: Callable[[Step], bool] | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        speculator = None
        if proposer is not None:
            guarded = GuardedProposer(proposer, "drafts", "drafts", vocab_size=spec.vocab_size)
            speculator = Speculator([guarded])
        self.scheduler = Scheduler(
            spec, policy=policy, cache=cache, on_fault=on_fault, speculator=speculator
        )
        self.runner = StrictRunner(spec, eos_every=eos_every, failing=failing, no_room=no_room)
        self.depth = depth
        self.now = 0.0
        self.tracks: dict[int, Track] = {}
        #: The step scheduled last, and the query tokens of all steps.
        self.plan: Step | None = None
        self.computed_tokens = 0
        self._ids = 0
        self._in_flight: deque[tuple[Step, object]] = deque()
        self._pages = WatchedPages(self.scheduler, self.runner)

    # -- what can happen -----------------------------------------------------------------------

    def submit(
        self,
        prompt: abc.Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        scope: str = "",
        priority: int = 0,
        deadline: float | None = None,
        stop_ids: frozenset[int] = frozenset(),
        conversation: Conversation | None = None,
    ) -> list[Track]:
        """Add a request, `params.n` answers of it. Raises `InvalidRequest` if it cannot fit."""
        max_total = self.scheduler.check_fits(len(prompt), params.max_tokens)
        answers: list[Track] = []
        for index in range(params.n):
            sequence = Sequence(
                self._ids,
                prompt,
                params,
                max_total=max_total,
                seed=seed + index,
                arrival=self.now,
                priority=priority,
                deadline=deadline,
                scope=scope,
                stop_ids=stop_ids,
                drafter=self._drafter(params, len(prompt), seed + index, scope),
                index=index,
                conversation=conversation,
                fork_of=answers[0].sequence if index else None,
            )
            self._ids += 1
            track = Track(
                sequence, *self._expect(prompt, params, seed + index, max_total, stop_ids)
            )
            answers.append(track)
            self.tracks[sequence.id] = track
            self.scheduler.add(sequence)
        self.check()
        return answers

    def _drafter(
        self, params: SamplingParams, prompt_len: int, seed: int, scope: str
    ) -> Drafter | None:
        if not self.scheduler.speculator.proposers:
            return None
        return Drafter(params, prompt_len, seed, scope=scope)

    def converse(self, what: str, argument: object) -> None:
        """As `Scheduler.converse`."""
        self.scheduler.converse(what, argument, self.now)
        self.check()

    def abort(self, track: Track) -> None:
        if track.ended is None:
            track.ended = "aborted"
        self.scheduler.finish(track.sequence, self.now)
        self.check()

    def pause(self, track: Track) -> None:
        self.scheduler.pause(track.sequence)
        self.check()

    def resume(self, track: Track) -> None:
        self.scheduler.resume(track.sequence)
        self.check()

    def schedule(self) -> bool:
        """Schedule and launch a step; whether there was one."""
        plan = self.scheduler.schedule(self.now)
        # Before the launch: a page published too early is not written yet.
        self.check()
        if plan is None:
            stuck = self.scheduler.has_work and not self._in_flight
            hold("I9", not stuck, "there is work, but no step")
            return False
        self.plan = plan
        try:
            handle = self.runner.launch(plan)
        except MemoryError:
            self._retract(plan)
            return True
        self.computed_tokens += plan.tokens
        self._in_flight.append((plan, handle))
        return True

    def _retract(self, plan: Step) -> None:
        for sequence in self.scheduler.retract(plan, self.now):
            track = self.tracks[sequence.id]
            hold("I7", track.ended is None, "{} lost after its end", sequence)
            track.ended = "failed"
        self.check()

    def update(self) -> bool:
        """Commit the oldest step in flight; whether there was one."""
        if not self._in_flight:
            return False
        plan, handle = self._in_flight.popleft()
        self._deliver(plan, self.runner.collect(handle))
        self.check()
        return True

    def step(self, dt: float = 0.01) -> bool:
        """One turn of a decode loop; whether anything moved."""
        self.now += dt
        moved = False
        while len(self._in_flight) < self.depth and self.schedule():
            moved = True
        return self.update() or moved

    def run_until(self, condition: Callable[[], bool], limit: int = 2000) -> int:
        """Take steps until the condition holds; how many it took."""
        for steps in range(limit):
            if condition():
                return steps
            self.step()
        raise InvariantError(f"I9: it never came true in {limit} steps")

    def drain(self, limit: int = 100_000) -> None:
        """Run until nothing is left, resuming whatever is paused."""
        for track in self.live():
            self.resume(track)
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise InvariantError(f"I9: not done after {limit} steps")
        hold("I7", not self.live(), "never ended: {}", self.live())
        check_drained(self.scheduler)

    def live(self) -> list[Track]:
        return [track for track in self.tracks.values() if track.ended is None]

    def forget(self) -> None:
        """Drop the tracks of ended requests that left the batch."""
        leaving = self.scheduler.states.leaving
        for track in [*self.tracks.values()]:
            if track.ended is not None and track.sequence.id not in leaving:
                del self.tracks[track.sequence.id]

    # -- checks --------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants, and the pages that just became free or published."""
        check_invariants(self.scheduler, [track.sequence for track in self.tracks.values()])
        for track in self.tracks.values():
            ended = track.sequence.state is SequenceState.FINISHED
            hold("I7", ended == (track.ended is not None), "{} ended silently", track.sequence)
        self._pages.check()

    def _deliver(self, plan: Step, result: StepResult) -> None:
        self.scheduler.update(plan, result, self.now)
        for sequence, _ in plan.failed:
            track = self.tracks[sequence.id]
            hold("I7", track.ended is None, "{} failed after its end", sequence)
            track.ended = "failed"
        rows = zip(plan.sequences, plan.drawn, plan.reasons, strict=True)
        for row, (sequence, tokens, reason) in enumerate(rows):
            if tokens is None:
                continue
            track = self.tracks[sequence.id]
            hold("I7", track.ended is None, "{} went on after its end", sequence)
            if row in plan.prompt_logprobs:
                scores = result.prompt_logprobs[row]
                first = plan.starts[row] + 1
                track.scored += range(first, first + len(scores))
            track.tokens += tokens
            so_far = track.expected[: len(track.tokens)]
            hold("I7", track.tokens == so_far, "{}: {}, not {}", sequence, track.tokens, so_far)
            if reason is not None:
                track.ended = reason
                whole = (reason, len(track.tokens)) == (track.ends, len(track.expected))
                hold("I7", whole, "{} ended by {}: {}", sequence, reason, track.tokens)
                if sequence.prompt_logprobs is not None:
                    every = list(range(1, sequence.prompt_len))
                    hold("I7", track.scored == every, "{}: logprobs of {}", sequence, track.scored)
        hold("I12", len(self.scheduler.in_flight) <= self.depth, "too many steps in flight")

    def _expect(
        self,
        prompt: abc.Sequence[int],
        params: SamplingParams,
        seed: int,
        max_total: int,
        stop_ids: frozenset[int],
    ) -> tuple[list[int], str]:
        count = max_total - len(prompt)
        answer = self.runner.oracle(prompt, params, seed, count, stop_ids=stop_ids)
        for i, token in enumerate(answer):
            if token in stop_ids and i + 1 >= params.min_tokens:
                return answer[: i + 1], "stop"
        return answer, "length"
