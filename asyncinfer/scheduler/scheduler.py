"""`Scheduler`: which tokens of which requests are computed in the next step.

Synchronous and deterministic: no clock (time is an argument), no thread, no tensor. Everything
is called on one thread. Several steps may be in flight: `schedule` counts tokens as computed at
once and leaves drawn tokens pending; `update` commits steps in the order they were scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.protocols.scheduling import SchedulingPolicy
from asyncinfer.scheduler.plan import RunnerSpec, StepPlan, StepResult
from asyncinfer.scheduler.request import Request

__all__ = ["Scheduler", "StepOutput"]


@dataclass(slots=True)
class StepOutput:
    """What one committed step changed, as parallel lists: entry `i` is a request that got tokens,
    prompt logprobs or an end. A request finished before the step was committed has no entry."""

    requests: list[Request] = field(default_factory=list)
    #: New answer tokens; empty for a chunk inside a prompt whose logprobs were asked for.
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    #: "stop" (a stop token, included in the tokens), "length", or None: it goes on.
    reasons: list[str | None] = field(default_factory=list)
    #: The row of the plan: the key of the result's logprobs and prompt logprobs.
    rows: list[int] = field(default_factory=list)
    #: Requests whose row failed, and why. They are finished; nothing of the step was committed.
    failed: list[tuple[Request, Exception]] = field(default_factory=list)


class Scheduler:
    """Continuous batching over a paged, prefix-cached KV cache.

    Args:
        spec: what the runner holds.
        policy: who goes first, who is preempted.
        cache: the prefix cache, made for `spec.block_size`; None computes every prompt.
        on_fault: told once when `policy` raises or answers nonsense and is replaced by
            first-come-first-served (a cache policy reports through the `PrefixCache`).
    """

    #: Counters since the start.
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    #: Answers that shared their sibling's prompt (`n > 1`).
    forks: int
    #: Times an arriving request waited for a prefix that another one was computing.
    shared: int

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        policy: SchedulingPolicy,
        cache: PrefixCache | None = None,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None: ...

    def check_fits(self, prompt_len: int, max_tokens: int | None) -> int:
        """`max_total` of a request: prompt and answer together, clipped to the context.

        A request whose prompt and one token fit but whose worst case is larger than the whole
        pool is refused if it asked for that many tokens and clipped if it did not. May be called
        from any thread.

        Raises:
            InvalidRequest: it can never fit the context or the pool.
        """

    def add(self, request: Request) -> None:
        """A new request; it waits. Forks are added after the request they fork from."""

    def finish(self, request: Request, now: float) -> None:
        """End a request for whatever reason (abort, stop string, error). Does nothing if it has
        ended. While a step that computes it is in flight it keeps slot and blocks; later results
        of such steps are dropped."""

    def pause(self, request: Request) -> None:
        """Schedule it no more until resumed (a token in flight is still committed). It keeps slot
        and blocks until somebody needs them. Does nothing if it is paused or has ended."""

    def resume(self, request: Request) -> None:
        """Go on with a paused request; does nothing if it is not paused."""

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed before an `update`, `resume` or `add`.
        The plan must be launched, and its result handed to `update`."""

    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """Commit the oldest step in flight: append its tokens, publish full blocks, end requests
        that are done, free what ended or was preempted."""

    def tenant(self, slot: int) -> Request | None:
        """Who owns a slot (for `plan.joins`: who was just admitted)."""

    @property
    def has_work(self) -> bool:
        """Whether anything is runnable, waiting or in flight (paused requests are not work)."""

    @property
    def in_flight(self) -> int:
        """Steps scheduled and not yet updated."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def paused(self) -> int: ...

    @property
    def blocks_total(self) -> int: ...

    @property
    def blocks_free(self) -> int: ...

    @property
    def blocks_cached(self) -> int: ...
