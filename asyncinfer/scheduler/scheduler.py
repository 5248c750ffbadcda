"""`Scheduler`: which tokens of which requests are computed in the next step.

Synchronous and deterministic: no clock (time is an argument), no thread, no tensor. Everything
is called on one thread. Several steps may be in flight: `schedule` counts tokens as computed at
once and leaves drawn tokens pending; `update` commits steps in the order they were scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.protocols.scheduling import SchedulingPolicy
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.flight import Flight
from asyncinfer.scheduler.limits import check_fits
from asyncinfer.scheduler.output import StepOutput
from asyncinfer.scheduler.plan import RunnerSpec, StepPlan, StepResult
from asyncinfer.scheduler.planner import Planner
from asyncinfer.scheduler.queue import Ranking
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.roster import Roster

__all__ = ["Scheduler"]

NEW, WAITING, RUNNING, PAUSED, LEAVING, FINISHED = RequestState


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
        on_preempt: told of every request that loses its blocks.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        policy: SchedulingPolicy,
        cache: PrefixCache | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        on_preempt: Callable[[Request], None] | None = None,
        clock: Callable[[], float] | None = None,
        label: str | None = None,
    ) -> None:
        self.spec = spec
        self.cache = cache
        self.counters = Counters()
        ranking = Ranking(policy, on_fault, clock, label)
        self.roster = Roster(spec, cache, ranking, self.counters, on_preempt)
        self.planner = Planner(spec, self.roster, self.counters)
        self.flights: deque[Flight] = deque()
        self._scheduled = 0
        #: Requests that were too much for the device once, and have drawn no token since.
        self._retracted: list[Request] = []

    def check_fits(
        self, prompt_len: int, max_tokens: int | None, prompt_logprobs: int | None = None
    ) -> int:
        """`max_total` of a request, or `InvalidRequest`: see `asyncinfer.scheduler.check_fits`.
        From any thread."""
        return check_fits(self.spec, prompt_len, max_tokens, prompt_logprobs)

    def add(self, request: Request) -> None:
        """A new request; it waits. Forks are added after the request they fork from."""
        assert request.state is NEW
        if self.cache is not None and not request.keys:
            request.keys = self.cache.keys(request.tokens, *request.tenant)
        self.roster.wait(request)

    def finish(self, request: Request, now: float) -> None:
        """End a request for whatever reason (abort, stop string, error). Does nothing if it has
        ended. While a step that computes it is in flight it keeps slot and blocks; later results
        of such steps are dropped."""
        self._tell(now)
        self.roster.finish(request)
        self._forget_ended()

    def pause(self, request: Request) -> None:
        """Schedule it no more until resumed (a token in flight is still committed). It keeps slot
        and blocks until somebody needs them. Does nothing if it is paused or has ended."""
        self.roster.pause(request)

    def resume(self, request: Request) -> None:
        """Go on with a paused request; does nothing if it is not paused."""
        self.roster.resume(request)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed before an `update`, `resume` or `add`.
        The plan must be launched, and its result handed to `update`."""
        self._tell(now)
        flight = self.planner.plan(self._scheduled)
        if flight is None:
            return None
        self.flights.append(flight)
        self._scheduled += 1
        return flight.plan

    def retract(self, plan: StepPlan, now: float) -> list[Request]:
        """Take back the step scheduled last, which the device has no room for; the next ones will
        be half as large at most, see `StepBudget`. The prompts that were in it are computed again,
        from what is in the prefix cache. Returns the requests that end here: prompts, and a step's
        only token, for which that happens a second time."""
        self._tell(now)
        flight = self.flights.pop()
        assert flight.plan is plan, "only the step scheduled last can be retracted"
        self.planner.budget.shrink(plan.tokens)
        lost: list[Request] = []
        for row, request in enumerate(flight.requests):
            request.in_flight -= 1
            request.left += plan.samples[row]
            request.computed -= plan.counts[row]
            decodes = row < flight.decodes
            if not decodes or plan.tokens == 1:
                if request in self._retracted:
                    lost.append(request)
                    self.roster.finish(request)
                    continue
                self._retracted.append(request)
            if not decodes:
                self.roster.preempt(request)
        self.roster.seats.unpin(plan)
        return lost

    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """Commit the oldest step in flight: append its tokens, publish full blocks, end requests
        that are done, free what ended or was preempted."""
        self._tell(now)
        flight = self.flights.popleft()
        assert flight.plan is plan, "steps are committed in the order they were scheduled"
        assert len(result.tokens) == sum(plan.samples), "a token for every draw"
        self.counters.steps += 1
        self.planner.budget.computed(retried=self._retracted != [] and self._retried(flight))
        out = StepOutput()
        self._commit_decodes(flight, result, out)
        drawn = iter(result.tokens[flight.decodes :])
        for row in range(flight.decodes, len(flight.requests)):
            token = next(drawn) if plan.samples[row] else None
            self._commit(flight, row, token, result, out)
        self.roster.seats.unpin(plan)
        self._forget_ended()
        return out

    def _retried(self, flight: Flight) -> bool:
        """Whether a retracted request is in the step. One that draws a token has had its room."""
        rows = {request.id: row for row, request in enumerate(flight.requests)}
        draws = flight.plan.samples
        self._retracted = [
            request
            for request in self._retracted
            if request.state is not FINISHED
            and not (request.id in rows and draws[rows[request.id]])
        ]
        return any(request.id in rows for request in self._retracted)

    def _forget_ended(self) -> None:
        """There may be no later step that would: an idle engine holds no prompt."""
        if self._retracted:
            self._retracted = [r for r in self._retracted if r.state is not FINISHED]

    def _commit_decodes(self, flight: Flight, result: StepResult, out: StepOutput) -> None:
        """`_commit` of the rows below `decodes`, which draw one token each. Runs for every token
        drawn: keep it lean."""
        failed, size = result.failed, self.spec.block_size
        requests, tokens = out.requests.append, out.tokens.append
        reasons, rows = out.reasons.append, out.rows.append
        drawn = 0
        for row, (request, token) in enumerate(zip(flight.requests, result.tokens, strict=False)):
            if row == flight.decodes:
                break
            if request.state is not RUNNING or failed:
                self._commit(flight, row, token, result, out)
                continue
            request.in_flight -= 1
            request.committed = committed = request.committed + 1
            if not committed % size:
                self._publish(request)
            known = request.tokens
            known.append(token)
            drawn += 1
            requests(request)
            tokens((token,))
            rows(row)
            if len(known) < request.max_total and token not in request.stop_ids:
                reasons(None)
            else:
                reasons(self._end(request))
        self.counters.generated_tokens += drawn

    def _commit(
        self, flight: Flight, row: int, token: int | None, result: StepResult, out: StepOutput
    ) -> None:
        """Commit one row of a request in whatever state."""
        request, plan = flight.requests[row], flight.plan
        request.in_flight -= 1
        if request.state is not FINISHED:
            error = result.failed.get(row)
            if error is not None:
                self.roster.finish(request)
                out.failed.append((request, error))
            else:
                request.committed += plan.counts[row]
                self._publish(request)
                scored = row in plan.prompt_logprobs
                if scored:
                    request.scored = min(request.committed, request.prompt_len - 1)
                reason = None
                if token is not None:
                    # Whoever decodes has drawn before: the first draw is never elsewhere.
                    if len(request.tokens) == request.prompt_len:
                        request.draw_first(token)
                    else:
                        request.tokens.append(token)
                    self.counters.generated_tokens += 1
                    reason = self._end(request)
                if scored or token is not None:
                    out.requests.append(request)
                    out.tokens.append(() if token is None else (token,))
                    out.reasons.append(reason)
                    out.rows.append(row)
        if not request.in_flight and request.id in self.roster.leaving:
            self.roster.settle(request)

    def _publish(self, request: Request) -> None:
        roster = self.roster
        blocks = roster.seats.blocks
        blocks.commit(request, request.committed)
        blocks.trim(request, request.committed)
        if request.state is RUNNING:
            roster.advance(request)

    def _end(self, request: Request) -> str | None:
        """End the request if its last token is its last one: why, or None."""
        known = request.tokens
        if known[-1] in request.stop_ids and (
            len(known) - request.prompt_len >= request.params.min_tokens
        ):
            reason = "stop"
        elif len(known) >= request.max_total:
            reason = "length"
        else:
            return None
        self.roster.finish(request)
        return reason

    def _tell(self, now: float) -> None:
        self.roster.now = now
        if self.cache is not None:
            self.cache.now = now

    # -- statistics ----------------------------------------------------------------------------

    def tenant(self, slot: int) -> Request | None:
        """Who owns a slot (for `plan.joins`: who was just admitted)."""
        return self.roster.seats.tenants[slot]

    @property
    def has_work(self) -> bool:
        """Whether anything is runnable or in flight (paused requests are not work)."""
        return bool(self.flights or self.roster)

    @property
    def in_flight(self) -> int:
        """Steps scheduled and not yet updated."""
        return len(self.flights)

    @property
    def running(self) -> int:
        return self.roster.running_count

    @property
    def waiting(self) -> int:
        roster = self.roster
        return len(roster.queue) + len(roster.following.requests) + roster.leaving_for(WAITING)

    @property
    def paused(self) -> int:
        return len(self.roster.paused) + self.roster.leaving_for(PAUSED)

    @property
    def blocks_total(self) -> int:
        return self.spec.num_blocks

    @property
    def blocks_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self.roster.seats.blocks.groups[0].pool.free)

    @property
    def blocks_cached(self) -> int:
        """Blocks that hold a reusable prefix and that no request uses."""
        return self.roster.seats.blocks.groups[0].cached

    @property
    def window_pages_total(self) -> int:
        return sum(group.num_pages for group in self.spec.groups[1:])

    @property
    def window_pages_free(self) -> int:
        """Window pages that hold nothing."""
        return sum(len(group.pool.free) for group in self.roster.seats.blocks.groups[1:])

    @property
    def window_pages_cached(self) -> int:
        """Window pages that no request uses, kept for blocks that hold a reusable prefix."""
        return sum(group.cached for group in self.roster.seats.blocks.groups[1:])
